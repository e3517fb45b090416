"""What operators did, through whichever door."""

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse

from unstuck.client import views
from unstuck.http.callers import Caller, Scope, needs
from unstuck.http.desk import AtDesk
from unstuck.http.page.templating import render

router = APIRouter()
PAGE = 100


@router.get("/audit")
def audit(
    request: Request,
    desk: AtDesk,
    caller: Annotated[Caller, Depends(needs(Scope.READ))],
    before_id: Annotated[int | None, Query(ge=1, le=2**63 - 1)] = None,
) -> HTMLResponse:
    found = desk.operator(caller).audit(before_id, PAGE)
    older = found[-1].id if len(found) == PAGE else None
    return render(request, "audit.html", notes=[views.audit_view(note) for note in found], older=older)
