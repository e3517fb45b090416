"""The page for people: rendered here, live by server-sent events, no build step, works offline."""

from pathlib import Path

from fastapi import FastAPI
from starlette.staticfiles import StaticFiles

from unstuck.http.page import (
    audit,
    doctor,
    events,
    job,
    jobs,
    live,
    overview,
    quarantine,
    queues,
    schedules,
    upkeep,
    verbs,
    workers,
    workflows,
)
from unstuck.http.page.errors import show_errors
from unstuck.http.page.hub import Hub
from unstuck.http.page.screens import Viewing

SCREENS = (
    overview.SCREEN,
    jobs.SCREEN,
    job.SCREEN,
    workflows.WORKFLOWS,
    workflows.WORKFLOW,
    workers.WORKERS,
    workers.WORKER,
    queues.SCREEN,
    schedules.SCREEN,
    quarantine.SCREEN,
    events.SCREEN,
    doctor.SCREEN,
    upkeep.SCREEN,
)
ROUTERS = (
    overview.router,
    jobs.router,
    job.router,
    workflows.router,
    workers.router,
    queues.router,
    schedules.router,
    quarantine.router,
    events.router,
    doctor.router,
    upkeep.router,
    audit.router,
    verbs.router,
    live.router,
)


def add_to(door: FastAPI) -> None:
    door.state.viewing = Viewing(door.state.desk)
    door.state.hub = Hub(door.state.viewing, {screen.name: screen for screen in SCREENS})
    show_errors(door)
    for router in ROUTERS:
        door.include_router(router, include_in_schema=False)
    door.mount("/static", StaticFiles(directory=Path(__file__).parent / "static"), name="static")
