"""The API, all under /api/v1: one file per kind of caller."""

from fastapi import Depends, FastAPI

from unstuck.http.api import (
    attempts,
    audit,
    enqueueing,
    events,
    health,
    jobs,
    lines,
    listing,
    looking,
    metrics,
    operating,
    quarantine,
    queues,
    schedules,
    stale,
    workers,
    workflows,
)
from unstuck.http.queries import refuse_unknown_query

ROUTERS = (
    health.router,
    # Of all requests beats come most often, and routes are tried in turn.
    workers.router,
    enqueueing.router,
    # Before those of one job: `/jobs/cancel` is no number of a job.
    listing.router,
    jobs.router,
    workflows.router,
    queues.router,
    lines.router,
    schedules.router,
    stale.router,
    operating.router,
    quarantine.router,
    looking.router,
    events.router,
    attempts.router,
    audit.router,
    metrics.router,
)
"""One line per file: whoever adds a part of the API adds it here."""


def add_to(door: FastAPI) -> None:
    for router in ROUTERS:
        # Probes and scrapers of others may add parameters of their own.
        of_others = router in (health.router, metrics.router)
        door.include_router(router, dependencies=[] if of_others else [Depends(refuse_unknown_query)])
