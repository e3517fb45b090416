"""What operators did, through whichever door."""

from typing import Annotated

from fastapi import APIRouter, Depends, Query
from pydantic import BaseModel

from unstuck.client import views
from unstuck.http.callers import Caller, Scope, needs
from unstuck.http.desk import AtDesk

router = APIRouter(prefix="/api/v1", tags=["operators"])


class Note(BaseModel):
    id: int
    at: str
    by: str
    door: str
    verb: str
    target: str
    outcome: str | None
    """Null: it was begun, and nobody knows how it ended."""


@router.get("/audit", summary="What operators did, newest first")
def audit(
    desk: AtDesk,
    caller: Annotated[Caller, Depends(needs(Scope.READ))],
    before_id: Annotated[int | None, Query(ge=1, le=2**63 - 1, description="Only what came before this one.")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> list[Note]:
    return [Note(**views.audit_view(note)) for note in desk.operator(caller).audit(before_id, limit)]
