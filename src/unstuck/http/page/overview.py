"""The first screen: is everything all right, and if not, what died and why."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse

from unstuck.http.callers import Caller, Scope, needs
from unstuck.http.desk import AtDesk
from unstuck.http.page.templating import render

router = APIRouter()


@router.get("/")
def overview(request: Request, desk: AtDesk, caller: Annotated[Caller, Depends(needs(Scope.READ))]) -> HTMLResponse:
    operator = desk.operator(caller)
    return render(request, "overview.html", workers=operator.workers(), queues=operator.queues())
