"""Allowed host names, the same-origin rule, and whether an address may be served without tokens.

A website can point its own name at this machine (DNS rebinding); its pages then ask us under that name. They cannot
do so under an address or under `localhost`.
"""

import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import urlsplit

from unstuck.config import HttpSettings
from unstuck.errors import ConfigError
from unstuck.ledger.contract import Ledger

_HOST = re.compile(r"(?:\[([0-9a-f:.]{2,45})\]|([a-z0-9_](?:[a-z0-9._-]{0,252})))(?::([0-9]{1,5}))?", re.IGNORECASE)
DEFAULT_PORTS = frozenset({80, 443})
REMEMBERED = 4_096
"""Names and addresses that were read already: the same few come with every request."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True)
class Host:
    """A host as it was asked for; the ports that go without saying are None."""

    name: str
    port: int | None


@lru_cache(REMEMBERED)
def read_host(text: str) -> Host | None:
    """Read a Host header or the like; None for what cannot be one."""
    found = _HOST.fullmatch(text)
    if found is None:
        return None
    port = int(found[3]) if found[3] else None
    if port is not None and port > 65535:
        return None
    name = plain_name(found[1] or found[2])
    if found[1] and read_address(name) is None:
        return None
    return Host(name, None if port in DEFAULT_PORTS else port)


def plain_name(name: str) -> str:
    """Give the one spelling of a name or address."""
    name = name.strip("[]").lower().removesuffix(".")
    address = read_address(name)
    return name if address is None else str(address)


@lru_cache(REMEMBERED)
def read_address(name: str) -> Address | None:
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def is_loopback(name: str) -> bool:
    """Does this name lead to this very machine, whoever answers for names?"""
    address = read_address(name)
    if address is not None:
        return address.is_loopback
    return name == "localhost" or name.endswith(".localhost")


@dataclass(frozen=True)
class Hosts:
    """The names under which a door may be asked for."""

    names: frozenset[str] = frozenset()
    suffixes: tuple[str, ...] = ()
    any_address: bool = False

    @classmethod
    def of(cls, allowed: Iterable[str], listening_on: str | None) -> "Hosts":
        """Take the names that the settings allow, and the address that is listened on, if that is known."""
        given = list(allowed)
        plain = {plain_name(name.rpartition(":")[0] if _has_port(name) else name) for name in given if name[:2] != "*."}
        suffixes = tuple(name[1:].lower() for name in given if name[:2] == "*.")
        bound = None if listening_on is None else read_address(plain_name(listening_on))
        if listening_on is not None:
            plain.add(plain_name(listening_on))
        return cls(frozenset(plain), suffixes, bound is not None and bound.is_unspecified)

    def allows(self, name: str) -> bool:
        if name in self.names or is_loopback(name):
            return True
        if self.any_address and read_address(name) is not None:
            return True
        return bool(self.suffixes) and name.endswith(self.suffixes)


def _has_port(name: str) -> bool:
    return re.search(r"[^:]:[0-9]+$", name) is not None and (name.count(":") == 1 or "]" in name)


SAFE = frozenset({"GET", "HEAD", "OPTIONS"})


@dataclass(frozen=True)
class Origin:
    from_browser: bool
    """It says that a browser sent it."""
    foreign: bool
    """Another website made it."""
    proven: bool
    """It says that our own page made it."""


def judge(headers: Mapping[str, str], host: Host, method: str) -> Origin:
    """Say where a request comes from; header names are in lower case."""
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    referer = headers.get("referer")
    said = [_same(origin, host)] if origin is not None else []
    if site is not None:
        said.append(site == "same-origin")
    # A referrer can only say that another website made it: it is no proof.
    elsewhere = method not in SAFE and not said and referer is not None and not _same(referer, host)
    # A link on another website may lead here: that is a look, not a deed. `none` is a person at the address bar.
    followed = method in SAFE and origin is None and (site == "none" or _is_navigation(headers))
    return Origin(
        from_browser=bool(said) or referer is not None,
        foreign=elsewhere or (not all(said) and not followed),
        proven=bool(said) and all(said),
    )


def _is_navigation(headers: Mapping[str, str]) -> bool:
    return headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"


def _same(url: str, host: Host) -> bool:
    """Compare without the scheme: whoever ended HTTPS in front of us did not say so."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and "@" not in parts.netloc and read_host(parts.netloc) == host


CURE = "Make one with `unstuck tokens create NAME --scope all`, or set UNSTUCK_HTTP_TOKEN."


@dataclass(frozen=True)
class Exposure:
    hosts: Hosts
    may_be_open: bool


def mounted(http: HttpSettings, *, open: bool = False) -> Exposure:
    """Inside another app nobody knows who can reach it: closed, unless that app says that it asks for itself."""
    return Exposure(Hosts.of(http.allowed_hosts, None), may_be_open=open)


def listening(http: HttpSettings, address: str) -> Exposure:
    return Exposure(Hosts.of(http.allowed_hosts, address), may_be_open=_private(http, address))


def check_token_exists(http: HttpSettings, address: str, ledger: Ledger) -> None:
    """Refuse to listen where others can reach it while nobody could be told from anybody."""
    if _private(http, address) or http.token is not None or any(token.valid for token in ledger.admin.api_tokens()):
        return
    where = f"on {address}" if not is_loopback(plain_name(address)) else f"as {', '.join(http.allowed_hosts)}"
    raise ConfigError(f"Others than this machine could come in {where}, and there is no valid token. {CURE}")


def _private(http: HttpSettings, address: str) -> bool:
    return all(is_loopback(plain_name(name)) for name in (address, *http.allowed_hosts))
