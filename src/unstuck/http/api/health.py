"""Is this process alive, can it reach its ledger, and does anybody look after the jobs in it?

The first two are for load balancers and service managers and need no token; they say nothing of jobs, since a door that
works must not be restarted because workers are missing. The third is for monitors.
"""

from typing import Annotated, Literal

from fastapi import APIRouter, Depends
from pydantic import BaseModel

from unstuck.client.vitality import judge
from unstuck.domain.errors import LedgerError
from unstuck.http.callers import Caller, Scope, needs
from unstuck.http.desk import AtDesk
from unstuck.http.problems import Problem, problem_of
from unstuck.logs import logger

log = logger("unstuck.http")
router = APIRouter(tags=["health"])


class Alive(BaseModel):
    status: Literal["ok"] = "ok"


class Trouble(BaseModel):
    code: str
    message: str
    cure: str


class Health(BaseModel):
    status: Literal["ok", "degraded"]
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
def readyz(desk: AtDesk) -> Alive:
    try:
        desk.ledger.check_schema()
    except LedgerError as error:
        # Whoever asks needs no token, so they hear what kind of trouble it is, and not where the database is.
        log.warning("Not ready", reason=str(error))
        kind = problem_of(error)
        code, cure = (kind.code, kind.cure) if kind.status == 503 else ("ledger_error", "Run `unstuck doctor`.")
        raise Problem(
            503, code, "The ledger cannot be used; the log says why.", cure=cure, headers={"Retry-After": "1"}
        ) from error
    return Alive()


@router.get("/api/v1/health", summary="Are workers and a reaper there, and are they on time?")
def health(desk: AtDesk, caller: Annotated[Caller, Depends(needs(Scope.READ))]) -> Health:
    ledger = desk.ledger
    fleet, queues = ledger.fleet(), ledger.queues()
    troubles = judge(fleet, queues, check_interval_s=desk.settings.recovery.check_interval_s)
    return Health(
        status="degraded" if troubles else "ok",
        ledger="sqlite" if ledger.one_host else "postgresql",
        workers=fleet.workers,
        workers_late=fleet.late,
        reaper_overdue_seconds=fleet.unswept_s,
        queues_without_workers=[queue.name for queue in queues if queue.pending and not queue.workers],
        troubles=[Trouble(code=one.code, message=one.message, cure=one.cure) for one in troubles],
    )
