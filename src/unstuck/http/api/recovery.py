"""Routes that repair by hand: stale jobs, quarantine, pruning."""

from typing import Annotated

from fastapi import Depends, Query, Response

from unstuck.client.operator.jobs import PAGE, quarantined_view
from unstuck.domain.api_tokens import Caller, Scope
from unstuck.domain.units import seconds
from unstuck.http.auth.callers import Requires
from unstuck.http.openapi import json_response
from unstuck.http.operator_schemas import QuarantinedView, StaleBody, StaleView
from unstuck.http.routing import api_router
from unstuck.http.services import ServicesDep

stale_router = api_router("stale", "/stale")

Reader = Annotated[Caller, Depends(Requires(Scope.READ))]
Operating = Annotated[Caller, Depends(Requires(Scope.OPERATE))]


@stale_router.get("", summary="Jobs in the hands of silent, suspect or dead workers", response_model=list[StaleView])
def stale(
    services: ServicesDep,
    caller: Reader,
    older_than: Annotated[str, Query(description="Of workers silent for at least so long: `10m`, or seconds.")] = "0",
) -> Response:
    return json_response(services.operator(caller).stale.list(seconds(older_than, "older_than")))


@stale_router.post("/fail", summary="Fail stale running jobs as WORKER_CRASHED", response_model=list[StaleView])
def fail(services: ServicesDep, caller: Operating, body: StaleBody | None = None) -> Response:
    """Whatever their `on_crash`. Gives what was done; a worker that beats in between keeps its jobs."""
    return json_response(services.operator(caller).stale.fail(_threshold_s(body)))


@stale_router.post("/requeue", summary="Give stale claimed jobs back to their queues", response_model=list[StaleView])
def requeue(services: ServicesDep, caller: Operating, body: StaleBody | None = None) -> Response:
    """Also running ones with `on_crash="retry"` whose own timeout has passed. Gives what was done."""
    return json_response(services.operator(caller).stale.requeue(_threshold_s(body)))


def _threshold_s(body: StaleBody | None) -> float | None:
    return None if body is None or body.older_than is None else seconds(body.older_than, "older_than")


quarantine_router = api_router("quarantine", "/quarantine")


@quarantine_router.get(
    "", summary="Quarantined jobs, newest first, with what they killed", response_model=list[QuarantinedView]
)
def quarantine(
    services: ServicesDep,
    caller: Reader,
    task: str | None = None,
    limit: Annotated[int, Query(ge=1, le=PAGE)] = 100,
) -> Response:
    return json_response([quarantined_view(job) for job in services.operator(caller).jobs.quarantined(task, limit)])
