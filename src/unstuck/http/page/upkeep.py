"""Upkeep: what silent workers hold, to be settled by hand, and finished jobs, to be cleared away."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse

from unstuck.domain.durations import brief
from unstuck.domain.states import FINAL
from unstuck.http.callers import Caller, Scope, needs
from unstuck.http.page.screens import Screen, Viewing
from unstuck.http.page.templating import render

SHOWN = 200

router = APIRouter()


def look(viewing: Viewing, key: str) -> dict[str, Any]:
    operator = viewing.operator()
    stale = operator.stale()
    return {
        "stale": stale[:SHOWN],
        "total": len(stale),
        "kept": brief(operator.kept_jobs_s()),
        "final_states": sorted(state.value for state in FINAL),
    }


SCREEN = Screen("upkeep", "upkeep.html", look, {"stale": "upkeep/stale.html"})


@router.get("/upkeep")
def upkeep(request: Request, caller: Annotated[Caller, Depends(needs(Scope.READ))]) -> HTMLResponse:
    viewing: Viewing = request.app.state.viewing
    return render(request, SCREEN.template, room=SCREEN.name, **SCREEN.values(viewing))
