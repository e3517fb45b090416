"""Workers: all of them, and one with its evidence, health, jobs and history."""

from collections import Counter
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse

from unstuck.client.why.autopsies import brief_cause
from unstuck.domain.api_tokens import Caller, Scope
from unstuck.domain.autopsy import Autopsy
from unstuck.domain.states import LIVE_STATES, JobState
from unstuck.domain.units import brief, brief_size
from unstuck.domain.worker_health import read_health
from unstuck.errors import UnknownWorker
from unstuck.http.auth.callers import Requires
from unstuck.http.dashboard.overview import by_trouble, card_of, crashed_at, remark_on, running_job
from unstuck.http.dashboard.pages import MAX_KEY_CHARS, Page, View
from unstuck.http.dashboard.rendering import count, render
from unstuck.http.dashboard.snapshot import MAX_HELD, Snapshot
from unstuck.http.problems import Problem
from unstuck.ledger.contract.workers import WorkerRecord

LATELY_S = 3600.0
PAGE = 100
EVENTS_SHOWN = 100
MOST_MEMORY_BYTES = 2**50

router = APIRouter()


def workers_data(viewing: View, key: str) -> dict[str, Any]:
    seen = viewing.snapshot()
    shown, _, first = key.partition("@")
    every = shown == "all"
    living = [worker for worker in seen.workers if worker.state in LIVE_STATES]
    gone = [worker for worker in seen.workers if worker.state not in LIVE_STATES]
    lately = gone if every else [worker for worker in gone if seen.at - crashed_at(worker) < LATELY_S]
    ordered = sorted(living, key=by_trouble) + sorted(lately, key=lambda worker: -crashed_at(worker))
    start = int(first) if first.isdecimal() else 0
    page = ordered[start : start + PAGE]
    return {
        "rows": [(worker, *remark_on(worker), read_health(worker.metadata.get("health"))) for worker in page],
        "memory": {worker.id: _memory(worker) for worker in page},
        "busy": _busy(seen),
        "total": len(ordered),
        "start": start,
        "size": PAGE,
        "every": every,
        "left_out": len(gone) - len(lately),
        "living": len(living),
    }


def _busy(seen: Snapshot) -> dict[str, int]:
    """Count what each runs as its tile does, which was read at another moment than the workers."""
    running = Counter(job.worker_id for job in seen.held if job.state is JobState.RUNNING)
    all_seen = len(seen.held) < MAX_HELD
    return {one.id: running[one.id] if all_seen else max(one.busy, running[one.id]) for one in seen.workers}


def worker_data(viewing: View, key: str) -> dict[str, Any]:
    seen = viewing.snapshot()
    worker = _find(seen, key)
    if worker is None:
        # Born since the last look, perhaps: its birth is an event, and is seen.
        seen = viewing.snapshots.snapshot(0.0)
        worker = _find(seen, key)
    if worker is None:
        raise UnknownWorker(f"There is no worker {key!r}: it never was, or was removed after it ended.")
    ledger = viewing.services.ledger
    return {
        "worker": worker,
        "tile": card_of(worker, seen),
        "held": [running_job(job, seen) for job in seen.held_jobs(worker.id)],
        "health": read_health(worker.metadata.get("health")),
        "autopsy": _autopsy(worker),
        "events": ledger.events.list(worker_id=worker.id, limit=EVENTS_SHOWN)[::-1],
        "metadata": viewing.redact(
            {name: value for name, value in worker.metadata.items() if name not in ("health", "settings")}
        ),
        "settings": viewing.redact(worker.metadata.get("settings") or {}),
        "alive": worker.state in LIVE_STATES,
        "memory_bytes": _memory(worker),
        "names": {one.id: one.name for one in seen.workers},
    }


def _find(seen: Snapshot, worker_id: str) -> WorkerRecord | None:
    return next((worker for worker in seen.workers if worker.id == worker_id), None)


def _memory(worker: WorkerRecord) -> int | None:
    """Give what its processes use together, where it says so."""
    said = worker.metadata.get("memory_bytes")
    # Anybody may say anything: a number beyond all memory is not one that can be shown.
    return said if isinstance(said, int) and not isinstance(said, bool) and 0 < said < MOST_MEMORY_BYTES else None


def _autopsy(worker: WorkerRecord) -> dict[str, Any] | None:
    verdict = worker.verdict
    if verdict is None:
        return None
    autopsy = verdict.autopsy
    return {
        "cause": verdict.evidence if autopsy is None else brief_cause(autopsy),
        "facts": [] if autopsy is None else _facts(autopsy),
        "stack": "" if autopsy is None else autopsy.stack,
        "stderr": "" if autopsy is None else autopsy.stderr,
        "verdict": verdict,
    }


def _facts(autopsy: Autopsy) -> list[tuple[str, str]]:
    """Give what else is known of how it ended."""
    known = [
        ("Signal", autopsy.signal),
        ("Exit code", None if autopsy.exit_code is None else str(autopsy.exit_code)),
        ("Not sure", autopsy.doubt if not autopsy.sure else None),
        ("Held", count(autopsy.beside_count, "job") if autopsy.beside_count else None),
        ("Lived for", None if autopsy.ran_s is None else brief(autopsy.ran_s)),
        ("Memory", None if autopsy.max_memory_bytes is None else f"{brief_size(autopsy.max_memory_bytes)} at most"),
        ("CPU time", None if autopsy.cpu_s is None else brief(autopsy.cpu_s)),
    ]
    return [(name, value) for name, value in known if value]


WORKERS_PAGE = Page("workers", "workers.html", workers_data, {"worker-rows": "workers/rows.html"})
WORKER_PAGE = Page("worker", "worker.html", worker_data, {"worker": "workers/one.html"})


@router.get("/workers")
def workers(
    request: Request,
    caller: Annotated[Caller, Depends(Requires(Scope.READ))],
    show: Annotated[str, Query(max_length=MAX_KEY_CHARS)] = "",
    start: Annotated[int, Query(ge=0, le=10_000_000)] = 0,
) -> HTMLResponse:
    key = f"{'all' if show == 'all' else ''}@{start}"
    viewing: View = request.app.state.view
    return render(request, WORKERS_PAGE.template, room=WORKERS_PAGE.name, key=key, **WORKERS_PAGE.values(viewing, key))


@router.get("/workers/{worker_id}")
def worker(request: Request, worker_id: str, caller: Annotated[Caller, Depends(Requires(Scope.READ))]) -> HTMLResponse:
    viewing: View = request.app.state.view
    if len(worker_id) > MAX_KEY_CHARS:
        raise Problem(404, "not_found", "There is no such worker.")
    return render(
        request, WORKER_PAGE.template, room=WORKER_PAGE.name, key=worker_id, **WORKER_PAGE.values(viewing, worker_id)
    )
