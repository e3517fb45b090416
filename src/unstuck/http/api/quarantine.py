"""Jobs that killed their processes too often: list them, let them go."""

from typing import Annotated

from fastapi import Depends, Query, Response

from unstuck.client.operator import PAGE
from unstuck.client.quarantine import quarantined_view
from unstuck.domain.states import JobState
from unstuck.http.answers import answer
from unstuck.http.api.listing import bulk, first_matching
from unstuck.http.bodies import api_router
from unstuck.http.callers import Caller, Scope, needs
from unstuck.http.desk import AtDesk
from unstuck.http.models.operating import BulkAnswer, QuarantinedView, ReleaseBody
from unstuck.store.records import JobFilter

router = api_router("quarantine", "/quarantine")

Reader = Annotated[Caller, Depends(needs(Scope.READ))]
Operating = Annotated[Caller, Depends(needs(Scope.OPERATE))]


@router.get("", summary="Quarantined jobs, newest first, with what they killed", response_model=list[QuarantinedView])
def quarantine(
    desk: AtDesk,
    caller: Reader,
    task: str | None = None,
    limit: Annotated[int, Query(ge=1, le=PAGE)] = 100,
) -> Response:
    return answer([quarantined_view(job) for job in desk.operator(caller).quarantined(task, limit)])


@router.post("/release", summary="Queue quarantined jobs again, each alone in its process", response_model=BulkAnswer)
def release(body: ReleaseBody, desk: AtDesk, caller: Operating) -> Response:
    """By number, all of a task, or all. A job that is not quarantined is answered with its state and left alone."""
    operator = desk.operator(caller)
    if body.ids is not None:
        ids, more = list(dict.fromkeys(body.ids)), False
    else:
        where = JobFilter(states=(JobState.QUARANTINED,), task=body.task)
        ids, more = first_matching(operator, where, body.limit)
    return bulk(ids, more, body.dry_run, operator.release)
