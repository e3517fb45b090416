"""Who may see and change one job: whoever has the scope, and whoever enqueued it through this door."""

from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import Path, Request
from starlette.concurrency import run_in_threadpool

from unstuck.domain.errors import JobNotFound
from unstuck.http.callers import Caller, Scope
from unstuck.http.desk import AtDesk, Desk
from unstuck.http.problems import Problem

JobId = Annotated[int, Path(ge=1, description="The job's number.")]


def mark_of(caller: Caller) -> str:
    """Give what a caller's jobs are marked with, as `enqueued_by`. Names of tokens may repeat, their ids do not."""
    return caller.name if caller.token_id is None else f"{caller.name} (token {caller.token_id})"


def of_job(scope: Scope) -> Callable[[JobId, Request, AtDesk], Awaitable[Caller]]:
    """Make a dependency like `needs`, which also lets through a token with the scope 'enqueue' to its own jobs."""

    async def check(job_id: JobId, request: Request, desk: AtDesk) -> Caller:
        caller: Caller = request.state.caller
        if scope in caller.scopes or await run_in_threadpool(_is_own, desk, caller, job_id):
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


def _is_own(desk: Desk, caller: Caller, job_id: int) -> bool:
    if Scope.ENQUEUE not in caller.scopes or caller.token_id is None:
        return False
    try:
        return desk.operator(caller).job(job_id).enqueued_by == mark_of(caller)
    except JobNotFound:
        # Whoever may not look must not learn which numbers there are.
        return False
