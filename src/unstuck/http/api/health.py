"""Is this process alive, and can it reach its ledger? For load balancers and service managers; needs no token."""

from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel

from unstuck.domain.errors import LedgerError
from unstuck.http.desk import AtDesk
from unstuck.http.problems import Problem
from unstuck.logs import logger

log = logger("unstuck.http")
router = APIRouter(tags=["health"])


class Alive(BaseModel):
    status: Literal["ok"] = "ok"


@router.get("/healthz", summary="Alive: the process answers")
def healthz() -> Alive:
    return Alive()


@router.get("/readyz", summary="Ready: the ledger can be reached and its tables fit")
def readyz(desk: AtDesk) -> Alive:
    try:
        desk.ledger.check_schema()
    except LedgerError as error:
        # Whoever asks needs no token, so they do not hear where the database is.
        log.warning("Not ready", reason=str(error))
        raise Problem(
            503, "not_ready", "The ledger cannot be used; the log says why.", headers={"Retry-After": "1"}
        ) from error
    return Alive()
