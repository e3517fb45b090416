"""Who calls, and which scope a route needs."""

from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import Path, Request
from starlette.concurrency import run_in_threadpool

from unstuck.domain.api_tokens import Caller
from unstuck.domain.api_tokens import Scope as Scope
from unstuck.errors import JobNotFound
from unstuck.http.problems import Problem
from unstuck.http.services import Services, ServicesDep


def own_key(caller: Caller, key: str | None) -> str | None:
    """Return the unique key as it is stored: a token without 'operate' has keys of its own.

    Else it could cancel the jobs of others with `on_duplicate`, and find out which keys they use."""
    if key is None or caller.token_id is None or Scope.OPERATE in caller.scopes:
        return key
    return f"token {caller.token_id}: {key}"


def may_limit(caller: Caller) -> bool:
    """Return whether a caller's jobs may change the limit of a concurrency key, which is shared by everybody."""
    return caller.token_id is None or Scope.OPERATE in caller.scopes


def Requires(scope: Scope, *others: Scope) -> Callable[[Request], Awaitable[Caller]]:
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


JobId = Annotated[int, Path(ge=1, description="The job's number.")]


def mark_of(caller: Caller) -> str:
    """Give what a caller's jobs are marked with, as `enqueued_by`. Names of tokens may repeat, their ids do not."""
    return caller.name if caller.token_id is None else f"{caller.name} (token {caller.token_id})"


def RequiresJob(scope: Scope) -> Callable[[JobId, Request, ServicesDep], Awaitable[Caller]]:
    """Make a dependency like `Requires`, which also admits a token with the scope 'enqueue' to its own jobs."""

    async def check(job_id: JobId, request: Request, services: ServicesDep) -> Caller:
        caller: Caller = request.state.caller
        if scope in caller.scopes or await run_in_threadpool(_is_own, services, caller, job_id):
            return caller
        raise Problem(
            403,
            "forbidden",
            f"This token lacks the scope '{scope}', and no job {job_id} was enqueued with it.",
            cure=f"Use a token that has it: `unstuck tokens create NAME --scope {scope}`.",
        )

    # Read by the guard, which checks it before a body is read; whose job it is, is checked here.
    check.scopes = (scope,)  # type: ignore[attr-defined]
    check.own = (Scope.ENQUEUE,)  # type: ignore[attr-defined]
    return check


def _is_own(services: Services, caller: Caller, job_id: int) -> bool:
    if Scope.ENQUEUE not in caller.scopes or caller.token_id is None:
        return False
    try:
        return services.operator(caller).jobs.get(job_id).enqueued_by == mark_of(caller)
    except JobNotFound:
        # Whoever may not look must not learn which numbers there are.
        return False
