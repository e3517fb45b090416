"""What Prometheus scrapes: the whole ledger in numbers."""

from typing import Annotated

from fastapi import APIRouter, Depends
from fastapi.responses import PlainTextResponse, Response

from unstuck.http.callers import Caller, Scope, needs
from unstuck.http.desk import AtDesk
from unstuck.metrics.exposition import CONTENT_TYPE

router = APIRouter(tags=["metrics"])


@router.get(
    "/metrics",
    summary="Metrics in Prometheus' text format",
    response_class=PlainTextResponse,
)
def metrics(desk: AtDesk, caller: Annotated[Caller, Depends(needs(Scope.READ))]) -> Response:
    return Response(desk.meter.text(desk.ledger), media_type=CONTENT_TYPE)
