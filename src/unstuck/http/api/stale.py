"""Settle by hand what silent workers hold."""

from typing import Annotated

from fastapi import Depends, Query, Response

from unstuck.domain.durations import seconds
from unstuck.http.answers import answer
from unstuck.http.bodies import api_router
from unstuck.http.callers import Caller, Scope, needs
from unstuck.http.desk import AtDesk
from unstuck.http.models.operating import StaleBody, StaleView

router = api_router("stale", "/stale")

Reader = Annotated[Caller, Depends(needs(Scope.READ))]
Operating = Annotated[Caller, Depends(needs(Scope.OPERATE))]


@router.get("", summary="Jobs in the hands of silent, suspect or dead workers", response_model=list[StaleView])
def stale(
    desk: AtDesk,
    caller: Reader,
    older_than: Annotated[str, Query(description="Of workers silent for at least so long: `10m`, or seconds.")] = "0",
) -> Response:
    return answer(desk.operator(caller).stale(seconds(older_than, "older_than")))


@router.post("/fail", summary="Fail stale running jobs as WORKER_CRASHED", response_model=list[StaleView])
def fail(desk: AtDesk, caller: Operating, body: StaleBody | None = None) -> Response:
    """Whatever their `on_crash`. Gives what was done; a worker that beats in between keeps its jobs."""
    return answer(desk.operator(caller).fail_stale(_threshold_s(body)))


@router.post("/requeue", summary="Give stale claimed jobs back to their queues", response_model=list[StaleView])
def requeue(desk: AtDesk, caller: Operating, body: StaleBody | None = None) -> Response:
    """Also running ones with `on_crash="retry"` whose own timeout has passed. Gives what was done."""
    return answer(desk.operator(caller).requeue_stale(_threshold_s(body)))


def _threshold_s(body: StaleBody | None) -> float | None:
    return None if body is None or body.older_than is None else seconds(body.older_than, "older_than")
