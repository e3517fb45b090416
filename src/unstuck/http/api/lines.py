"""Lines of jobs with one concurrency key: look at them, choose how many may be at work."""

from typing import Annotated

from fastapi import Depends, Query, Response

from unstuck.client import views
from unstuck.http.answers import answer
from unstuck.http.bodies import api_router
from unstuck.http.callers import Caller, Scope, needs
from unstuck.http.desk import AtDesk
from unstuck.http.models.operating import LineLimitBody, LineView

MAX_LINES = 1_000

router = api_router("queues", "/lines")

Reader = Annotated[Caller, Depends(needs(Scope.READ))]
Operating = Annotated[Caller, Depends(needs(Scope.OPERATE))]


@router.get("", summary="List lines: who has their places, and how many wait", response_model=list[LineView])
def lines(
    desk: AtDesk,
    caller: Reader,
    key: Annotated[str | None, Query(description="This one alone.")] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_LINES)] = 100,
) -> Response:
    return answer([views.line_view(line) for line in desk.operator(caller).lines(key, limit)])


@router.post("/limit", summary="Choose how many jobs of a key may be at work at once", response_model=LineView | None)
def limit_line(body: LineLimitBody, desk: AtDesk, caller: Operating) -> Response:
    """It stands over what is enqueued later, until it is taken back with null."""
    found = desk.operator(caller).limit_line(body.key, body.limit)
    return answer(None if found is None else views.line_view(found))
