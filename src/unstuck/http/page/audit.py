"""What operators did, through whichever door."""

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse

from unstuck.http.callers import Caller, Scope, needs
from unstuck.http.page.screens import Viewing, common
from unstuck.http.page.templating import render

SHOWN = 100

router = APIRouter()


@router.get("/audit")
def audit(
    request: Request,
    caller: Annotated[Caller, Depends(needs(Scope.READ))],
    before_id: Annotated[int | None, Query(ge=1, le=2**63 - 1)] = None,
) -> HTMLResponse:
    viewing: Viewing = request.app.state.viewing
    notes = viewing.operator().audit(before_id, SHOWN)
    older = notes[-1].id if len(notes) == SHOWN else None
    return render(request, "audit.html", **common(viewing.snapshot()), notes=notes, older=older, here="/audit")
