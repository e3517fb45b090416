"""The page for people: rendered here, live by server-sent events, no build step, works offline."""

from pathlib import Path

from fastapi import FastAPI
from starlette.staticfiles import StaticFiles

from unstuck.http.page import audit, overview

ROUTERS = (overview.router, audit.router)


def add_to(door: FastAPI) -> None:
    for router in ROUTERS:
        door.include_router(router, include_in_schema=False)
    door.mount("/static", StaticFiles(directory=Path(__file__).parent / "static"), name="static")
