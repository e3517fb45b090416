"""The doctor: what is wrong, why, and the cure."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse

from unstuck.http.callers import Caller, Scope, needs
from unstuck.http.page.screens import Screen, Viewing
from unstuck.http.page.templating import render

router = APIRouter()


def look(viewing: Viewing, key: str) -> dict[str, Any]:
    seen = viewing.snapshot()
    findings = seen.findings or ()
    tally = {
        severity: sum(finding.severity == severity for finding in findings)
        for severity in ("problem", "warning", "info")
    }
    return {"findings": findings, "examined_at": seen.examined_at, "tally": tally}


SCREEN = Screen("doctor", "doctor.html", look, {"findings": "doctor/findings.html"})


@router.get("/doctor")
def doctor(request: Request, caller: Annotated[Caller, Depends(needs(Scope.READ))]) -> HTMLResponse:
    viewing: Viewing = request.app.state.viewing
    viewing.lookout.examine()
    return render(request, SCREEN.template, room=SCREEN.name, **SCREEN.values(viewing))
