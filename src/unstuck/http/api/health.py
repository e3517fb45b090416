"""Is this process alive, can it reach its ledger, and does anybody look after the jobs in it?

The first two are for load balancers and service managers and need no token; they say nothing of jobs, since a door that
works must not be restarted because workers are missing. The third is for monitors.
"""

import asyncio
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel
from starlette.datastructures import State

from unstuck.client.vitality import judge
from unstuck.domain.errors import LedgerError
from unstuck.domain.rules import rules_of_ledger
from unstuck.http.callers import Caller, Scope, needs
from unstuck.http.desk import AtDesk, Desk
from unstuck.http.problems import Problem, problem_of
from unstuck.logs import logger

log = logger("unstuck.http")
router = APIRouter(tags=["health"])

READY_WITHIN_S = 5.0


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
async def readyz(request: Request, desk: AtDesk) -> Alive:
    """An answer comes within some seconds, also where the database is silent and does not even refuse."""
    try:
        async with asyncio.timeout(READY_WITHIN_S):
            await asyncio.shield(_look(request.app.state, desk))
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


def _look(state: State, desk: Desk) -> "asyncio.Future[None]":
    """Give the look at the ledger that is under way, or begin one: probes that come meanwhile must not pile up."""
    looking: asyncio.Future[None] | None = getattr(state, "looking", None)
    if looking is None or looking.done() or looking.get_loop() is not asyncio.get_running_loop():
        looking = asyncio.ensure_future(asyncio.to_thread(lambda: desk.ledger.check_schema()))
        # All who waited for it may be gone when it fails.
        looking.add_done_callback(lambda done: done.cancelled() or done.exception())
        state.looking = looking
    return looking


@router.get("/api/v1/health", summary="Are workers and a reaper there, and are they on time?")
def health(desk: AtDesk, caller: Annotated[Caller, Depends(needs(Scope.READ))]) -> Health:
    ledger = desk.ledger
    fleet, queues = ledger.fleet(), ledger.queues()
    rules = rules_of_ledger(ledger.recovery_rules(), desk.settings.recovery.rules)
    troubles = judge(fleet, queues, check_interval_s=rules.check_interval_s)
    return Health(
        status="degraded" if troubles else "ok",
        ledger="sqlite" if ledger.one_host else "postgresql",
        workers=fleet.workers,
        workers_late=fleet.late,
        reaper_overdue_seconds=fleet.unswept_s,
        queues_without_workers=[queue.name for queue in queues if queue.pending and not queue.workers],
        troubles=[Trouble(code=one.code, message=one.message, cure=one.cure) for one in troubles],
    )
