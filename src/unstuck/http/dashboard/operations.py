"""Pages of queues, schedules, quarantine, events, doctor, maintenance and the audit log."""

import time
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse

from unstuck.client.views import workers_firing
from unstuck.domain.api_tokens import Caller, Scope
from unstuck.domain.events import LEVELS
from unstuck.domain.limits import QueueLimit, limit_in_words
from unstuck.domain.schedules import in_words
from unstuck.domain.states import FINAL_STATES, LIVE_STATES
from unstuck.domain.units import brief
from unstuck.http.auth.callers import Requires
from unstuck.http.dashboard.pages import MAX_KEY_CHARS, Page, View, common
from unstuck.http.dashboard.rendering import render
from unstuck.http.dashboard.snapshot import Snapshot
from unstuck.ledger.contract.queues import KeyRecord, QueueLimitRecord
from unstuck.ledger.contract.schedules import ScheduleRecord

MAX_KEYS = 500
SHOWN_HOLDERS = 5

router = APIRouter()


def queues_data(viewing: View, key: str) -> dict[str, Any]:
    queues = viewing.snapshot().queues
    operator = viewing.operator()
    lines = operator.ledger.queues.concurrency_keys(limit=MAX_KEYS)
    return {
        "queues": sorted(queues, key=lambda queue: queue.name),
        "longest_s": max((queue.oldest_pending_s or 0.0 for queue in queues), default=0.0),
        "limits": {record.name: _limit(record) for record in operator.ledger.queues.limits()},
        "lines": [
            _concurrency_key(key_record)
            for key_record in lines
            if key_record.blocked or len(key_record.holders) >= key_record.places
        ],
        "lines_free": sum(
            not key_record.blocked and len(key_record.holders) < key_record.places for key_record in lines
        ),
        "lines_cut": MAX_KEYS if len(lines) == MAX_KEYS else None,
    }


def _limit(record: QueueLimitRecord) -> dict[str, Any]:
    limit = record.limit
    rated = limit.rate is not None and limit.window_s is not None
    return {
        "record": record,
        "full": limit.concurrency is not None and record.held >= limit.concurrency,
        "rate": limit_in_words(QueueLimit(None, limit.rate, limit.window_s)) if rated else "",
        "next_at": None if record.in_s is None else time.time() + record.in_s,
    }


def _concurrency_key(key_record: KeyRecord) -> dict[str, Any]:
    shown = key_record.holders[:SHOWN_HOLDERS]
    return {"record": key_record, "holders": shown, "more": len(key_record.holders) - len(shown)}


QUEUES_PAGE = Page(
    "queues",
    "queues.html",
    queues_data,
    {"queue-rows": "queues/rows.html", "line-rows": "queues/concurrency_keys.html"},
)


@router.get("/queues")
def queues(request: Request, caller: Annotated[Caller, Depends(Requires(Scope.READ))]) -> HTMLResponse:
    viewing: View = request.app.state.view
    return render(request, QUEUES_PAGE.template, room=QUEUES_PAGE.name, **QUEUES_PAGE.values(viewing))


LATE_S = 2.0
"""A tick that is due for less is on its way."""


def schedules_data(viewing: View, key: str) -> dict[str, Any]:
    seen = viewing.snapshot()
    known = {task for worker in seen.workers if worker.state in LIVE_STATES for task in worker.tasks}
    return {"schedules": [_row(record, seen, known) for record in viewing.services.ledger.schedules.list()]}


def _row(record: ScheduleRecord, seen: Snapshot, known: set[str]) -> dict[str, Any]:
    late = not record.paused and record.next_at is not None and seen.at - record.next_at > LATE_S
    return {
        "record": record,
        "words": in_words(record.timing),
        "workers": len(workers_firing(record, seen.workers)),
        "task_known": record.task in known,
        "late": late,
    }


SCHEDULES_PAGE = Page("schedules", "schedules.html", schedules_data, {"schedule-rows": "schedules/rows.html"})


@router.get("/schedules")
def schedules(request: Request, caller: Annotated[Caller, Depends(Requires(Scope.READ))]) -> HTMLResponse:
    viewing: View = request.app.state.view
    return render(request, SCHEDULES_PAGE.template, room=SCHEDULES_PAGE.name, **SCHEDULES_PAGE.values(viewing))


MAX_QUARANTINED_SHOWN = 50


def quarantine_data(viewing: View, key: str) -> dict[str, Any]:
    found = viewing.operator().jobs.quarantined(limit=MAX_QUARANTINED_SHOWN)
    return {"jobs": found, "shown": MAX_QUARANTINED_SHOWN}


QUARANTINE_PAGE = Page("quarantine", "quarantine.html", quarantine_data, {"quarantined": "quarantine/list.html"})


@router.get("/quarantine")
def quarantine(request: Request, caller: Annotated[Caller, Depends(Requires(Scope.READ))]) -> HTMLResponse:
    viewing: View = request.app.state.view
    return render(request, QUARANTINE_PAGE.template, room=QUARANTINE_PAGE.name, **QUARANTINE_PAGE.values(viewing))


MAX_EVENTS_SHOWN = 200


def events_data(viewing: View, key: str) -> dict[str, Any]:
    seen = viewing.snapshot()
    kinds: dict[str, int] = {}
    for event in seen.events:
        kinds[event.kind] = kinds.get(event.kind, 0) + 1
    # What was asked for stays in the list, also when the last of its kind is older than an hour.
    kinds.setdefault(key, 0) if key else None
    shown = [event for event in reversed(seen.events) if not key or event.kind == key]
    return {
        "events": shown[:MAX_EVENTS_SHOWN],
        "kinds": sorted(kinds.items()),
        "kind": key,
        "total": len(shown),
        "names": {worker.id: worker.name for worker in seen.workers},
        "tasks_of": seen.tasks_of,
        "levels": LEVELS,
    }


EVENTS_PAGE = Page(
    "events", "events.html", events_data, {"event-kinds": "events/kinds.html", "event-rows": "events/rows.html"}
)


@router.get("/events")
def events(
    request: Request,
    caller: Annotated[Caller, Depends(Requires(Scope.READ))],
    kind: Annotated[str, Query(max_length=MAX_KEY_CHARS)] = "",
) -> HTMLResponse:
    viewing: View = request.app.state.view
    return render(request, EVENTS_PAGE.template, room=EVENTS_PAGE.name, key=kind, **EVENTS_PAGE.values(viewing, kind))


def doctor_data(viewing: View, key: str) -> dict[str, Any]:
    seen = viewing.snapshot()
    findings = seen.findings or ()
    tally = {
        severity: sum(finding.severity == severity for finding in findings)
        for severity in ("problem", "warning", "info")
    }
    return {"findings": findings, "examined_at": seen.examined_at, "tally": tally}


DOCTOR_PAGE = Page("doctor", "doctor.html", doctor_data, {"findings": "doctor/findings.html"})


@router.get("/doctor")
def doctor(request: Request, caller: Annotated[Caller, Depends(Requires(Scope.READ))]) -> HTMLResponse:
    viewing: View = request.app.state.view
    viewing.snapshots.examine()
    return render(request, DOCTOR_PAGE.template, room=DOCTOR_PAGE.name, **DOCTOR_PAGE.values(viewing))


MAX_STALE_SHOWN = 200


def maintenance_data(viewing: View, key: str) -> dict[str, Any]:
    operator = viewing.operator()
    stale = operator.stale.list()
    return {
        "stale": stale[:MAX_STALE_SHOWN],
        "total": len(stale),
        "kept": brief(operator.jobs.retention_s()),
        "final_states": sorted(state.value for state in FINAL_STATES),
    }


MAINTENANCE_PAGE = Page("upkeep", "maintenance.html", maintenance_data, {"stale": "maintenance/stale.html"})


@router.get("/upkeep")
def maintenance(request: Request, caller: Annotated[Caller, Depends(Requires(Scope.READ))]) -> HTMLResponse:
    viewing: View = request.app.state.view
    return render(request, MAINTENANCE_PAGE.template, room=MAINTENANCE_PAGE.name, **MAINTENANCE_PAGE.values(viewing))


MAX_AUDIT_SHOWN = 100


@router.get("/audit")
def audit(
    request: Request,
    caller: Annotated[Caller, Depends(Requires(Scope.READ))],
    before_id: Annotated[int | None, Query(ge=1, le=2**63 - 1)] = None,
) -> HTMLResponse:
    viewing: View = request.app.state.view
    notes = viewing.services.ledger.admin.audit(before_id, MAX_AUDIT_SHOWN)
    older = notes[-1].id if len(notes) == MAX_AUDIT_SHOWN else None
    return render(request, "audit.html", **common(viewing.snapshot()), notes=notes, older=older, here="/audit")
