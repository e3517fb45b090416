"""Queues: what waits in them, who serves them, and the verbs to stop, start and empty them."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse

from unstuck.http.callers import Caller, Scope, needs
from unstuck.http.page.screens import Screen, Viewing
from unstuck.http.page.templating import render

router = APIRouter()


def look(viewing: Viewing, key: str) -> dict[str, Any]:
    queues = viewing.snapshot().queues
    return {
        "queues": sorted(queues, key=lambda queue: queue.name),
        "longest_s": max((queue.oldest_pending_s or 0.0 for queue in queues), default=0.0),
    }


SCREEN = Screen("queues", "queues.html", look, {"queue-rows": "queues/rows.html"})


@router.get("/queues")
def queues(request: Request, caller: Annotated[Caller, Depends(needs(Scope.READ))]) -> HTMLResponse:
    viewing: Viewing = request.app.state.viewing
    return render(request, SCREEN.template, room=SCREEN.name, **SCREEN.values(viewing))
