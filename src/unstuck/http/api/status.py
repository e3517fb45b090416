"""Routes about the state of the service: liveness, readiness, health, doctor, metrics, tasks, audit log.

The first two are for load balancers and service managers and need no token; they say nothing of jobs, since a door that
works must not be restarted because workers are missing. The third is for monitors.
"""

import asyncio
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import PlainTextResponse
from fastapi.responses import Response as Response_
from pydantic import BaseModel
from starlette.datastructures import State

from unstuck.client import views
from unstuck.client.doctor.diagnose import diagnose_open
from unstuck.client.doctor.health import quick_health
from unstuck.domain.api_tokens import Caller, Scope
from unstuck.domain.conditions import HealthStatus, Severity
from unstuck.domain.policy import decode_policy
from unstuck.errors import LedgerError
from unstuck.http.auth.callers import Requires
from unstuck.http.openapi import json_response
from unstuck.http.operator_schemas import FindingView, TaskView
from unstuck.http.problems import Problem, problem_of
from unstuck.http.routing import api_router
from unstuck.http.services import Services, ServicesDep
from unstuck.logs import logger
from unstuck.metrics.prometheus import CONTENT_TYPE

log = logger("unstuck.http")
router = APIRouter(tags=["health"])

READY_WITHIN_S = 5.0


class Alive(BaseModel):
    status: Literal["ok"] = "ok"


class Trouble(BaseModel):
    code: str
    """As `unstuck doctor` names it."""
    severity: Severity
    message: str
    cure: str


class Health(BaseModel):
    status: HealthStatus
    """Failing: one of the troubles is a problem. Degraded: all of them are warnings."""
    ledger: str
    """The kind of database: to have this answer it was reached."""
    workers: dict[str, int]
    """How many there are of each state."""
    workers_late: int
    reaper_overdue_seconds: float | None
    """Since the last round of a reaper ran out: 0 while reapers walk, null where there never was one."""
    queues_without_workers: list[str]
    """That have jobs which are due."""
    troubles: list[Trouble]


@router.get("/healthz", summary="Alive: the process answers")
async def healthz() -> Alive:
    return Alive()


@router.get("/readyz", summary="Ready: the ledger can be reached and its tables fit")
async def readyz(request: Request, services: ServicesDep) -> Alive:
    """An answer comes within some seconds, also where the database is silent and does not even refuse."""
    try:
        async with asyncio.timeout(READY_WITHIN_S):
            await asyncio.shield(_look(request.app.state, services))
    except TimeoutError as error:
        log.warning("Not ready", reason=f"the ledger has said nothing for {READY_WITHIN_S:g}s")
        raise Problem(
            503,
            "ledger_silent",
            f"The ledger has said nothing for {READY_WITHIN_S:g} seconds.",
            cure="See whether the database is overloaded, frozen or cut off.",
            headers={"Retry-After": "1"},
        ) from error
    except LedgerError as error:
        # Whoever asks needs no token, so they hear what kind of trouble it is, and not where the database is.
        log.warning("Not ready", reason=str(error))
        kind = problem_of(error)
        code, cure = (kind.code, kind.cure) if kind.status == 503 else ("ledger_error", "Run `unstuck doctor`.")
        raise Problem(
            503, code, "The ledger cannot be used; the log says why.", cure=cure, headers={"Retry-After": "1"}
        ) from error
    return Alive()


def _look(state: State, services: Services) -> "asyncio.Future[None]":
    """Give the look at the ledger that is under way, or begin one: probes that come meanwhile must not pile up."""
    looking: asyncio.Future[None] | None = getattr(state, "looking", None)
    if looking is None or looking.done() or looking.get_loop() is not asyncio.get_running_loop():
        looking = asyncio.ensure_future(asyncio.to_thread(lambda: services.ledger.check_schema()))
        # All who waited for it may be gone when it fails.
        looking.add_done_callback(lambda done: done.cancelled() or done.exception())
        state.looking = looking
    return looking


@router.get("/api/v1/health", summary="Are workers and a reaper there, and are they on time?")
def health(services: ServicesDep, caller: Annotated[Caller, Depends(Requires(Scope.READ))]) -> Health:
    found = quick_health(services.ledger, services.settings)
    return Health(
        status=found.status,
        ledger="sqlite" if services.ledger.single_host else "postgresql",
        workers=found.fleet.workers,
        workers_late=found.fleet.late,
        reaper_overdue_seconds=found.fleet.unswept_s,
        queues_without_workers=list(found.unserved),
        troubles=[
            Trouble(code=one.code, severity=one.severity, message=f"{one.what}. {one.why}", cure=one.cure)
            for one in found.troubles
        ],
    )


reports_router = api_router("care")

Reader = Annotated[Caller, Depends(Requires(Scope.READ))]


@reports_router.get(
    "/doctor", summary="What is wrong, why, and the cure; the worst first", response_model=list[FindingView]
)
async def doctor(services: ServicesDep, caller: Reader) -> Response:
    """Empty where all is well. Takes a moment longer where a worker seems to do nothing: it is looked at twice."""
    return json_response(await services.run_slow(lambda: diagnose_open(services.ledger, services.settings)))


@reports_router.get("/tasks", summary="Tasks that living or past workers know", response_model=list[TaskView])
def tasks(services: ServicesDep, caller: Reader) -> Response:
    return json_response(
        [
            {
                "name": task.name,
                "queue": task.queue,
                "is_async": task.is_async,
                "policy": views.policy_view(decode_policy(task.policy)),
            }
            for task in sorted(services.ledger.queues.tasks(), key=lambda task: task.name)
        ]
    )


metrics_router = APIRouter(tags=["metrics"])


@metrics_router.get(
    "/metrics",
    summary="Metrics in Prometheus' text format",
    response_class=PlainTextResponse,
)
def metrics(services: ServicesDep, caller: Annotated[Caller, Depends(Requires(Scope.READ))]) -> Response_:
    return Response_(services.meter.text(services.ledger), media_type=CONTENT_TYPE)


audit_router = APIRouter(prefix="/api/v1", tags=["operators"])


class AuditEntryView(BaseModel):
    id: int
    at: str
    by: str
    door: str
    verb: str
    target: str
    outcome: str | None
    """Null: it was begun, and nobody knows how it ended."""


@audit_router.get("/audit", summary="What operators did, newest first")
def audit(
    services: ServicesDep,
    caller: Annotated[Caller, Depends(Requires(Scope.READ))],
    before_id: Annotated[int | None, Query(ge=1, le=2**63 - 1, description="Only what came before this one.")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> list[AuditEntryView]:
    return [AuditEntryView(**views.audit_view(note)) for note in services.ledger.admin.audit(before_id, limit)]
