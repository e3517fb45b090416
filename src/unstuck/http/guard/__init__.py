"""Who may come in: the Host that was asked for, the token or login, the origin of unsafe requests, limits."""

from fastapi import FastAPI

from unstuck.http.guard.doorman import Doorman


def stand_guard(door: FastAPI) -> None:
    door.add_middleware(Doorman, desk=door.state.desk)
