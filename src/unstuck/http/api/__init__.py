"""The API, all under /api/v1: one file per kind of caller."""

from fastapi import Depends, FastAPI

from unstuck.http.api import enqueue, events, jobs, queues, recovery, status, workers, workflows
from unstuck.http.query_params import refuse_unknown_query
from unstuck.http.workers import protocol

ROUTERS = (
    status.router,
    # Of all requests beats come most often, and routes are tried in turn.
    workers.router,
    enqueue.router,
    # Before those of one job: `/jobs/cancel` is no number of a job.
    jobs.list_router,
    jobs.router,
    workflows.router,
    queues.router,
    queues.keys_router,
    queues.schedules_router,
    recovery.stale_router,
    workers.operator_router,
    recovery.quarantine_router,
    status.reports_router,
    events.router,
    protocol.router,
    status.audit_router,
    status.metrics_router,
)
"""One line per file: whoever adds a part of the API adds it here."""


def add_to(web_app: FastAPI) -> None:
    for router in ROUTERS:
        # Probes and scrapers of others may add parameters of their own.
        of_others = router in (status.router, status.metrics_router)
        web_app.include_router(router, dependencies=[] if of_others else [Depends(refuse_unknown_query)])
