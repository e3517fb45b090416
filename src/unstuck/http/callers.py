"""Who asks, and what they may do."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum

from fastapi import Request

from unstuck.http.problems import Problem


class Scope(StrEnum):
    READ = "read"
    ENQUEUE = "enqueue"
    WORKER = "worker"
    OPERATE = "operate"


@dataclass(frozen=True)
class Caller:
    name: str
    scopes: frozenset[Scope]
    token_id: str | None = None
    """None: somebody on this machine, where no token is asked for."""


LOCAL = Caller("web", frozenset(Scope))


def needs(scope: Scope) -> Callable[[Request], Awaitable[Caller]]:
    """Make a dependency that lets through only whoever has this scope, and gives who that is."""

    async def check(request: Request) -> Caller:
        caller: Caller = request.state.caller
        if scope not in caller.scopes:
            raise Problem(
                403,
                "forbidden",
                f"This token lacks the scope '{scope}'.",
                cure=f"Use a token that has it: `unstuck tokens create NAME --scope {scope}`.",
            )
        return caller

    return check
