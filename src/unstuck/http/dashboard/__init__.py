"""The page for people: rendered here, live by server-sent events, no build step, works offline."""

from pathlib import Path

from fastapi import FastAPI
from starlette.staticfiles import StaticFiles

from unstuck.http.dashboard import actions, jobs, live, operations, overview, workers, workflows
from unstuck.http.dashboard.live import LiveHub
from unstuck.http.dashboard.pages import View
from unstuck.http.dashboard.rendering import show_errors

PAGES = (
    overview.OVERVIEW_PAGE,
    jobs.JOBS_PAGE,
    jobs.JOB_PAGE,
    workflows.WORKFLOWS_PAGE,
    workflows.WORKFLOW_PAGE,
    workers.WORKERS_PAGE,
    workers.WORKER_PAGE,
    operations.QUEUES_PAGE,
    operations.SCHEDULES_PAGE,
    operations.QUARANTINE_PAGE,
    operations.EVENTS_PAGE,
    operations.DOCTOR_PAGE,
    operations.MAINTENANCE_PAGE,
)
ROUTERS = (
    overview.router,
    jobs.router,
    workflows.router,
    workers.router,
    operations.router,
    actions.router,
    live.router,
)


def add_to(web_app: FastAPI) -> None:
    web_app.state.view = View(web_app.state.services)
    web_app.state.hub = LiveHub(web_app.state.view, {page.name: page for page in PAGES})
    show_errors(web_app)
    for router in ROUTERS:
        web_app.include_router(router, include_in_schema=False)
    web_app.mount("/static", StaticFiles(directory=Path(__file__).parent / "static"), name="static")
