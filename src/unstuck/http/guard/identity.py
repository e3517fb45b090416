"""Say who a caller is: by the token in their hand, by their login, or because they stand on this very machine."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from unstuck.http.callers import LOCAL, Caller
from unstuck.http.guard import sessions
from unstuck.http.guard.hosts import read_address
from unstuck.http.guard.keyring import Key, Keyring
from unstuck.http.guard.place import Place
from unstuck.http.problems import Problem

PASSED_ON = ("forwarded", "via", "x-real-ip")
PASSED_ON_PREFIX = "x-forwarded-"
IPV6_NETWORK_BITS = 64


@dataclass(frozen=True)
class Identity:
    caller: Caller
    who: str
    """By which requests are counted."""
    csrf: str = ""
    """What a form must carry; empty where a token in the hand says enough: no website can make a browser send that."""
    by_cookie: bool = False


async def identify(
    headers: Mapping[str, str], keyring: Keyring, place: Place, address: str, local_csrf: str
) -> Identity | None:
    """Give who asks; None for somebody who says nothing about it."""
    if (said := headers.get("authorization")) is not None:
        return await _by_token(said, keyring)
    if (cookie := cookie_of(headers)) is not None and (found := await _by_login(cookie, keyring)) is not None:
        return found
    if place.may_be_open and not (await keyring.keys()).any_ever:
        _refuse_proxies(headers)
        return Identity(LOCAL, f"address {address}", local_csrf)
    return None


async def _by_token(said: str, keyring: Keyring) -> Identity:
    scheme, _, text = said.partition(" ")
    key = await keyring.find(text.strip()) if scheme.lower() == "bearer" else None
    if key is None:
        raise unauthenticated("This token is not valid: it never was, has expired, or was revoked.")
    return Identity(Caller(key.name, key.scopes, key.id), f"token {key.id}")


async def _by_login(cookie: str, keyring: Keyring) -> Identity | None:
    session = sessions.read(cookie)
    key = None if session is None else await keyring.by_id(session.token_id)
    if session is None or key is None or not sessions.stands(session, key, time.time()):
        return None
    return logged_in(session, key)


def logged_in(session: sessions.Session, key: Key) -> Identity:
    caller = Caller(key.name, key.scopes, key.id, door="page")
    return Identity(caller, f"token {key.id}", sessions.csrf_of(session, key), by_cookie=True)


def at_the_page(identity: Identity) -> Identity:
    return replace(identity, caller=replace(identity.caller, door="page"))


def cookie_of(headers: Mapping[str, str]) -> str | None:
    for part in headers.get("cookie", "").split(";"):
        name, _, value = part.strip().partition("=")
        if name == sessions.COOKIE:
            return value
    return None


def address_of(client: tuple[str, int] | None) -> str:
    """Give by which address a stranger is counted: of IPv6 the network, since everybody has a whole one."""
    name = client[0] if client else "unknown"
    address = read_address(name)
    if address is None or address.version == 4:
        return name if address is None else str(address)
    return f"{int(address) >> (128 - IPV6_NETWORK_BITS):x}/{IPV6_NETWORK_BITS}"


def unauthenticated(detail: str) -> Problem:
    return Problem(
        401,
        "unauthenticated",
        detail,
        cure="Send `Authorization: Bearer …` with a token of `unstuck tokens create NAME --scope …`.",
        headers={"WWW-Authenticate": 'Bearer realm="unstuck"'},
    )


def _refuse_proxies(headers: Mapping[str, str]) -> None:
    # Something in front passes others through to what was meant for this machine alone.
    if any(name in PASSED_ON or name.startswith(PASSED_ON_PREFIX) for name in headers):
        raise Problem(
            403,
            "token_needed",
            "This came through a proxy, and without tokens this door is for its own machine alone.",
            cure="Make a token: `unstuck tokens create NAME --scope all`.",
        )
