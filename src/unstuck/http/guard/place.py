"""Where a door stands: which names lead to it, and whether it may be open without a token.

It is open to whoever reaches it only if that is this machine alone: bound to loopback, with no other name allowed
(which would mean that something in front passes others through), and with no token made yet.
"""

from dataclasses import dataclass

from unstuck.config import Web
from unstuck.domain.errors import ConfigError
from unstuck.http.guard.hosts import Hosts, is_loopback, plain_name
from unstuck.store.contract import Ledger

CURE = "Make one with `unstuck tokens create NAME --scope all`, or set UNSTUCK_WEB_TOKEN."


@dataclass(frozen=True)
class Place:
    hosts: Hosts
    may_be_open: bool


def mounted(web: Web, *, open: bool = False) -> Place:
    """Inside another app nobody knows who can reach it: closed, unless that app says that it asks for itself."""
    return Place(Hosts.of(web.allowed_hosts, None), may_be_open=open)


def listening(web: Web, address: str) -> Place:
    return Place(Hosts.of(web.allowed_hosts, address), may_be_open=_private(web, address))


def check_token_exists(web: Web, address: str, ledger: Ledger) -> None:
    """Refuse to listen where others can reach it while nobody could be told from anybody."""
    if _private(web, address) or web.token is not None or any(token.valid for token in ledger.api_tokens()):
        return
    where = f"on {address}" if not is_loopback(plain_name(address)) else f"as {', '.join(web.allowed_hosts)}"
    raise ConfigError(f"Others than this machine could come in {where}, and there is no valid token. {CURE}")


def _private(web: Web, address: str) -> bool:
    return all(is_loopback(plain_name(name)) for name in (address, *web.allowed_hosts))
