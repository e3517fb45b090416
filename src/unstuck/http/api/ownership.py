"""Who may see and change one job: whoever has the scope, and whoever enqueued it through this door."""

from collections.abc import Callable
from typing import Annotated

from fastapi import Path, Request

from unstuck.http.callers import Caller, Scope, check_scope
from unstuck.http.desk import AtDesk, Desk

JobId = Annotated[int, Path(ge=1, description="The job's number.")]


def mark_of(caller: Caller) -> str:
    """Give what a caller's jobs are marked with, as `enqueued_by`. Names of tokens may repeat, their ids do not."""
    return caller.name if caller.token_id is None else f"{caller.name} (token {caller.token_id})"


def of_job(scope: Scope) -> Callable[[JobId, Request, AtDesk], Caller]:
    """Make a dependency like `needs`, which also lets through a token with the scope 'enqueue' to its own jobs."""

    def check(job_id: JobId, request: Request, desk: AtDesk) -> Caller:
        caller: Caller = request.state.caller
        if scope in caller.scopes or not _is_own(desk, caller, job_id):
            return check_scope(request, scope)
        return caller

    # Read by the test that asks of every route what it needs.
    check.scopes = (scope,)  # type: ignore[attr-defined]
    return check


def _is_own(desk: Desk, caller: Caller, job_id: int) -> bool:
    if Scope.ENQUEUE not in caller.scopes or caller.token_id is None:
        return False
    return desk.operator(caller).job(job_id).enqueued_by == mark_of(caller)
