"""Events: what happened, live, newest first, by kind."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse

from unstuck.domain.events import LEVELS
from unstuck.http.callers import Caller, Scope, needs
from unstuck.http.page.screens import MAX_KEY_CHARS, Screen, Viewing
from unstuck.http.page.templating import render

SHOWN = 200

router = APIRouter()


def look(viewing: Viewing, key: str) -> dict[str, Any]:
    seen = viewing.snapshot()
    kinds: dict[str, int] = {}
    for event in seen.events:
        kinds[event.kind] = kinds.get(event.kind, 0) + 1
    # What was asked for stays in the list, also when the last of its kind is older than an hour.
    kinds.setdefault(key, 0) if key else None
    shown = [event for event in reversed(seen.events) if not key or event.kind == key]
    return {
        "events": shown[:SHOWN],
        "kinds": sorted(kinds.items()),
        "kind": key,
        "total": len(shown),
        "names": {worker.id: worker.name for worker in seen.workers},
        "tasks_of": seen.tasks_of,
        "levels": LEVELS,
    }


SCREEN = Screen("events", "events.html", look, {"event-kinds": "events/kinds.html", "event-rows": "events/rows.html"})


@router.get("/events")
def events(
    request: Request,
    caller: Annotated[Caller, Depends(needs(Scope.READ))],
    kind: Annotated[str, Query(max_length=MAX_KEY_CHARS)] = "",
) -> HTMLResponse:
    viewing: Viewing = request.app.state.viewing
    return render(request, SCREEN.template, room=SCREEN.name, key=kind, **SCREEN.values(viewing, kind))
