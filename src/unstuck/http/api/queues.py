"""Routes for queues, concurrency keys and schedules."""

from typing import Annotated

from fastapi import Depends, Path, Query, Response

from unstuck.client import views
from unstuck.client.views import schedule_view
from unstuck.domain.api_tokens import Caller, Scope
from unstuck.domain.limits import read_limit
from unstuck.http.auth.callers import Requires
from unstuck.http.openapi import json_response
from unstuck.http.operator_schemas import (
    LimitBody,
    LimitView,
    LineLimitBody,
    LineView,
    Paused,
    Purged,
    QueueView,
    Resumed,
    ScheduleBody,
    SchedulePaused,
    ScheduleRemoved,
    ScheduleRun,
    ScheduleView,
)
from unstuck.http.routing import api_router
from unstuck.http.services import ServicesDep

router = api_router("queues", "/queues")

Reader = Annotated[Caller, Depends(Requires(Scope.READ))]
Operating = Annotated[Caller, Depends(Requires(Scope.OPERATE))]
# Names of queues may hold a slash.
QueueName = Annotated[str, Path(min_length=1, description="The queue.")]


@router.get("", summary="List queues with what waits in them and who serves them", response_model=list[QueueView])
def queues(services: ServicesDep, caller: Reader) -> Response:
    found = sorted(services.ledger.queues.list(), key=lambda queue: queue.name)
    limits = {record.name: record for record in services.ledger.queues.limits()}
    return json_response([views.queue_view(queue, limits.get(queue.name)) for queue in found])


@router.post("/pause", summary="Stop handing out jobs of every queue", response_model=Paused)
def pause_all(services: ServicesDep, caller: Operating) -> Response:
    """What runs goes on."""
    return json_response({"paused": sorted(services.operator(caller).queues.pause(None))})


@router.post("/resume", summary="Hand out jobs of every queue again", response_model=Resumed)
def resume_all(services: ServicesDep, caller: Operating) -> Response:
    return json_response({"resumed": sorted(services.operator(caller).queues.resume(None))})


@router.post("/{name:path}/pause", summary="Stop handing out jobs of a queue", response_model=Paused)
def pause(name: QueueName, services: ServicesDep, caller: Operating) -> Response:
    """What runs goes on. Empty where it was paused already."""
    return json_response({"paused": services.operator(caller).queues.pause(name)})


@router.post("/{name:path}/resume", summary="Hand out jobs of a queue again", response_model=Resumed)
def resume(name: QueueName, services: ServicesDep, caller: Operating) -> Response:
    return json_response({"resumed": services.operator(caller).queues.resume(name)})


@router.post("/{name:path}/limit", summary="Choose how much may be taken of a queue", response_model=LimitView | None)
def limit(name: QueueName, body: LimitBody, services: ServicesDep, caller: Operating) -> Response:
    """Across all workers, over what its app declares. Null where it takes its limit from its app again."""
    asked = None if body.as_declared else read_limit(body.concurrency, body.rate)
    found = services.operator(caller).queues.limit(name, asked)
    return json_response(None if found is None else views.limit_view(found))


@router.post("/{name:path}/purge", summary="Cancel the jobs of a queue that have not begun", response_model=Purged)
def purge(name: QueueName, services: ServicesDep, caller: Operating) -> Response:
    """Jobs that run, sleep, wait for a signal or wait for their next try go on, and so do the nodes of workflows that
    have begun. There is no confirmation."""
    return json_response({"queue": name, "cancelled": services.operator(caller).queues.purge(name)})


MAX_KEYS = 1_000

keys_router = api_router("queues", "/lines")


@keys_router.get("", summary="List lines: who has their places, and how many wait", response_model=list[LineView])
def concurrency_keys(
    services: ServicesDep,
    caller: Reader,
    key: Annotated[str | None, Query(description="This one alone.")] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_KEYS)] = 100,
) -> Response:
    return json_response([views.line_view(line) for line in services.ledger.queues.concurrency_keys(key, limit)])


@keys_router.post(
    "/limit", summary="Choose how many jobs of a key may be at work at once", response_model=LineView | None
)
def limit_key(body: LineLimitBody, services: ServicesDep, caller: Operating) -> Response:
    """It stands over what is enqueued later, until it is taken back with null."""
    found = services.operator(caller).queues.limit_key(body.key, body.limit)
    return json_response(None if found is None else views.line_view(found))


schedules_router = api_router("schedules", "/schedules")
# Names of schedules may hold a slash.
Name = Annotated[str, Path(min_length=1, description="The schedule.")]


@schedules_router.get("", summary="List schedules with their next and last tick", response_model=list[ScheduleView])
def schedules(services: ServicesDep, caller: Reader) -> Response:
    return json_response(services.operator(caller).schedules.views())


@schedules_router.post("/{name:path}/pause", summary="Stop a schedule", response_model=SchedulePaused)
def pause_schedule(name: Name, services: ServicesDep, caller: Operating) -> Response:
    """What it enqueued runs."""
    return json_response({"name": name, "paused": True, "changed": services.operator(caller).schedules.pause(name)})


@schedules_router.post(
    "/{name:path}/resume", summary="Let a schedule go on with its next tick", response_model=SchedulePaused
)
def resume_schedule(name: Name, services: ServicesDep, caller: Operating) -> Response:
    return json_response({"name": name, "paused": False, "changed": services.operator(caller).schedules.resume(name)})


@schedules_router.post("/{name:path}/run", summary="Enqueue the job of a schedule now", response_model=ScheduleRun)
def run(name: Name, services: ServicesDep, caller: Operating) -> Response:
    """Beside its ticks, which go on as they were."""
    return json_response({"name": name, "job_id": services.operator(caller).schedules.run(name)})


@schedules_router.put(
    "/{name:path}", summary="Make a schedule, or change one that was made here", response_model=ScheduleView
)
def create(name: Name, body: ScheduleBody, services: ServicesDep, caller: Operating) -> Response:
    """Every worker fires it. One that stands in the code of an app is changed there."""
    operator = services.operator(caller)
    record = operator.schedules.create(name, **body.model_dump())
    return json_response(schedule_view(record, operator.ledger.workers.list(living_only=True)))


@schedules_router.delete("/{name:path}", summary="Forget a schedule", response_model=ScheduleRemoved)
def remove(name: Name, services: ServicesDep, caller: Operating) -> Response:
    """What it enqueued stays."""
    return json_response({"name": name, "removed": True, "workers": services.operator(caller).schedules.remove(name)})
