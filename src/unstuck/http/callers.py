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


def needs(scope: Scope, *others: Scope) -> Callable[[Request], Awaitable[Caller]]:
    """Make a dependency that lets through only whoever has this scope (or one of the others), and gives who that is."""

    async def check(request: Request) -> Caller:
        caller: Caller = request.state.caller
        return caller if caller.scopes.intersection(others) else check_scope(request, scope)

    # Read by the test that asks of every route what it needs.
    check.scopes = (scope, *others)  # type: ignore[attr-defined]
    return check


def check_scope(request: Request, scope: Scope) -> Caller:
    """Give who asks, or refuse whoever lacks this scope."""
    caller: Caller = request.state.caller
    if scope not in caller.scopes:
        raise Problem(
            403,
            "forbidden",
            f"This token lacks the scope '{scope}'.",
            cure=f"Use a token that has it: `unstuck tokens create NAME --scope {scope}`.",
        )
    return caller
