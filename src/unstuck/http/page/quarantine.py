"""Quarantine: jobs that killed their processes too often, with all that each of them killed."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse

from unstuck.http.callers import Caller, Scope, needs
from unstuck.http.page.screens import Screen, Viewing
from unstuck.http.page.templating import render

SHOWN = 50

router = APIRouter()


def look(viewing: Viewing, key: str) -> dict[str, Any]:
    found = viewing.operator().quarantined(limit=SHOWN)
    return {"jobs": found, "shown": SHOWN}


SCREEN = Screen("quarantine", "quarantine.html", look, {"quarantined": "quarantine/list.html"})


@router.get("/quarantine")
def quarantine(request: Request, caller: Annotated[Caller, Depends(needs(Scope.READ))]) -> HTMLResponse:
    viewing: Viewing = request.app.state.viewing
    return render(request, SCREEN.template, room=SCREEN.name, **SCREEN.values(viewing))
