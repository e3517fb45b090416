"""Queues: look at them, stop and start them, empty them."""

from typing import Annotated

from fastapi import Depends, Path, Response

from unstuck.client import views
from unstuck.domain.limits import read_limit
from unstuck.http.answers import answer
from unstuck.http.bodies import api_router
from unstuck.http.callers import Caller, Scope, needs
from unstuck.http.desk import AtDesk
from unstuck.http.models.operating import LimitBody, LimitView, Paused, Purged, QueueView, Resumed

router = api_router("queues", "/queues")

Reader = Annotated[Caller, Depends(needs(Scope.READ))]
Operating = Annotated[Caller, Depends(needs(Scope.OPERATE))]
# Names of queues may hold a slash.
QueueName = Annotated[str, Path(min_length=1, description="The queue.")]


@router.get("", summary="List queues with what waits in them and who serves them", response_model=list[QueueView])
def queues(desk: AtDesk, caller: Reader) -> Response:
    found = sorted(desk.operator(caller).queues(), key=lambda queue: queue.name)
    limits = {record.name: record for record in desk.operator(caller).queue_limits()}
    return answer([views.queue_view(queue, limits.get(queue.name)) for queue in found])


@router.post("/pause", summary="Stop handing out jobs of every queue", response_model=Paused)
def pause_all(desk: AtDesk, caller: Operating) -> Response:
    """What runs goes on."""
    return answer({"paused": sorted(desk.operator(caller).pause(None))})


@router.post("/resume", summary="Hand out jobs of every queue again", response_model=Resumed)
def resume_all(desk: AtDesk, caller: Operating) -> Response:
    return answer({"resumed": sorted(desk.operator(caller).resume(None))})


@router.post("/{name:path}/pause", summary="Stop handing out jobs of a queue", response_model=Paused)
def pause(name: QueueName, desk: AtDesk, caller: Operating) -> Response:
    """What runs goes on. Empty where it was paused already."""
    return answer({"paused": desk.operator(caller).pause(name)})


@router.post("/{name:path}/resume", summary="Hand out jobs of a queue again", response_model=Resumed)
def resume(name: QueueName, desk: AtDesk, caller: Operating) -> Response:
    return answer({"resumed": desk.operator(caller).resume(name)})


@router.post("/{name:path}/limit", summary="Choose how much may be taken of a queue", response_model=LimitView | None)
def limit(name: QueueName, body: LimitBody, desk: AtDesk, caller: Operating) -> Response:
    """Across all workers, over what its app declares. Null where it takes its limit from its app again."""
    asked = None if body.as_declared else read_limit(body.concurrency, body.rate)
    found = desk.operator(caller).limit_queue(name, asked)
    return answer(None if found is None else views.limit_view(found))


@router.post("/{name:path}/purge", summary="Cancel the jobs of a queue that have not begun", response_model=Purged)
def purge(name: QueueName, desk: AtDesk, caller: Operating) -> Response:
    """Jobs that run, sleep, wait for a signal or wait for their next try go on, and so do the nodes of workflows that
    have begun. There is no confirmation."""
    return answer({"queue": name, "cancelled": desk.operator(caller).purge(name)})
