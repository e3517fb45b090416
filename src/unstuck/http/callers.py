"""Who asks, and what they may do."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fastapi import Request

from unstuck.domain.api_tokens import Scope as Scope
from unstuck.http.problems import Problem


@dataclass(frozen=True)
class Caller:
    name: str
    scopes: frozenset[Scope]
    token_id: str | None = None
    """None: somebody on this machine, where no token is asked for."""
    door: str = "http"
    """`http` for programs, `page` for people: what the audit log says."""


LOCAL = Caller("web", frozenset(Scope))
NOBODY = Caller("", frozenset())
"""Who sees the login form."""


def own_key(caller: Caller, key: str | None) -> str | None:
    """Return the unique key as it is stored: a token without 'operate' has keys of its own.

    Else it could cancel the jobs of others with `on_duplicate`, and find out which keys they use."""
    if key is None or caller.token_id is None or Scope.OPERATE in caller.scopes:
        return key
    return f"token {caller.token_id}: {key}"


def needs(scope: Scope, *others: Scope) -> Callable[[Request], Awaitable[Caller]]:
    """Make a dependency that lets through only whoever has this scope (or one of the others), and gives who that is."""

    async def check(request: Request) -> Caller:
        caller: Caller = request.state.caller
        return caller if caller.scopes.intersection(others) else check_scope(request, scope)

    # Read by the guard, which checks it before a body is read.
    check.scopes = (scope, *others)  # type: ignore[attr-defined]
    return check


def check_scope(request: Request, scope: Scope) -> Caller:
    """Give who asks, or refuse whoever lacks this scope."""
    caller: Caller = request.state.caller
    if scope not in caller.scopes:
        raise lacks(scope)
    return caller


def lacks(scope: Scope) -> Problem:
    """Return the problem of a caller without this scope."""
    return Problem(
        403,
        "forbidden",
        f"This token lacks the scope '{scope}'.",
        cure=f"Use a token that has it: `unstuck tokens create NAME --scope {scope}`.",
    )
