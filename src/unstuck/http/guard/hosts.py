"""Which names lead here: an answer under any other name is how a strange website would read a local server.

A website can point its own name at this machine (DNS rebinding); its pages then ask us under that name. They cannot
do so under an address or under `localhost`.
"""

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

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
