"""The API, all under /api/v1: one file per kind of caller."""

from fastapi import FastAPI

from unstuck.http.api import events, health

ROUTERS = (events.router, health.router)
"""One line per file: whoever adds a part of the API adds it here."""


def add_to(door: FastAPI) -> None:
    for router in ROUTERS:
        door.include_router(router)
