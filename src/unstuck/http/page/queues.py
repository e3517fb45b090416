"""Queues: what waits in them, who serves them, their limits and lines, and the verbs to stop, start and empty them."""

import time
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse

from unstuck.domain.limits import QueueLimit, limit_in_words
from unstuck.http.callers import Caller, Scope, needs
from unstuck.http.page.screens import Screen, Viewing
from unstuck.http.page.templating import render
from unstuck.store.records import LineRecord, QueueLimitRecord

MAX_LINES = 500
SHOWN_HOLDERS = 5

router = APIRouter()


def look(viewing: Viewing, key: str) -> dict[str, Any]:
    queues = viewing.snapshot().queues
    operator = viewing.operator()
    lines = operator.lines(limit=MAX_LINES)
    return {
        "queues": sorted(queues, key=lambda queue: queue.name),
        "longest_s": max((queue.oldest_pending_s or 0.0 for queue in queues), default=0.0),
        "limits": {record.name: _limit(record) for record in operator.queue_limits()},
        "lines": [_line(line) for line in lines if line.blocked or len(line.holders) >= line.places],
        "lines_free": sum(not line.blocked and len(line.holders) < line.places for line in lines),
        "lines_cut": MAX_LINES if len(lines) == MAX_LINES else None,
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


def _line(line: LineRecord) -> dict[str, Any]:
    shown = line.holders[:SHOWN_HOLDERS]
    return {"record": line, "holders": shown, "more": len(line.holders) - len(shown)}


SCREEN = Screen("queues", "queues.html", look, {"queue-rows": "queues/rows.html", "line-rows": "queues/lines.html"})


@router.get("/queues")
def queues(request: Request, caller: Annotated[Caller, Depends(needs(Scope.READ))]) -> HTMLResponse:
    viewing: Viewing = request.app.state.viewing
    return render(request, SCREEN.template, room=SCREEN.name, **SCREEN.values(viewing))
