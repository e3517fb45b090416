"""Schedules: what is enqueued by the clock, when next, and the verbs to stop, start, run and remove them."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse

from unstuck.client.schedule_views import keepers
from unstuck.domain.states import LIVING
from unstuck.domain.ticking import in_words
from unstuck.http.callers import Caller, Scope, needs
from unstuck.http.page.screens import Screen, Viewing
from unstuck.http.page.snapshot import Snapshot
from unstuck.http.page.templating import render
from unstuck.store.records import ScheduleRecord

LATE_S = 2.0
"""A tick that is due for less is on its way."""

router = APIRouter()


def look(viewing: Viewing, key: str) -> dict[str, Any]:
    seen = viewing.snapshot()
    known = {task for worker in seen.workers if worker.state in LIVING for task in worker.tasks}
    return {"schedules": [_row(record, seen, known) for record in viewing.operator().schedules()]}


def _row(record: ScheduleRecord, seen: Snapshot, known: set[str]) -> dict[str, Any]:
    late = not record.paused and record.next_at is not None and seen.at - record.next_at > LATE_S
    return {
        "record": record,
        "words": in_words(record.timing),
        "workers": len(keepers(record, seen.workers)),
        "task_known": record.task in known,
        "late": late,
    }


SCREEN = Screen("schedules", "schedules.html", look, {"schedule-rows": "schedules/rows.html"})


@router.get("/schedules")
def schedules(request: Request, caller: Annotated[Caller, Depends(needs(Scope.READ))]) -> HTMLResponse:
    viewing: Viewing = request.app.state.viewing
    return render(request, SCREEN.template, room=SCREEN.name, **SCREEN.values(viewing))
