"""Is this process alive, and can it reach its ledger? For load balancers and service managers; needs no token."""

from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel

from unstuck.http.desk import AtDesk

router = APIRouter(tags=["health"])


class Alive(BaseModel):
    status: Literal["ok"] = "ok"


@router.get("/healthz", summary="Alive: the process answers")
def healthz() -> Alive:
    return Alive()


@router.get("/readyz", summary="Ready: the ledger can be reached and its tables fit")
def readyz(desk: AtDesk) -> Alive:
    desk.ledger.check_schema()
    return Alive()
