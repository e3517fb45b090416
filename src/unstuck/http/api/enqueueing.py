"""Take jobs in: one, or many at once; a request that is sent again stores nothing twice."""

from collections.abc import Sequence
from typing import Annotated

from fastapi import Depends, Response

from unstuck.domain.errors import UnstuckError
from unstuck.http.answers import answer
from unstuck.http.api.once import REPEATED, IdempotencyKey, request_of, used_before
from unstuck.http.api.ownership import mark_of
from unstuck.http.bodies import api_router
from unstuck.http.building import builder
from unstuck.http.callers import Caller, Scope, needs
from unstuck.http.desk import AtDesk, Desk
from unstuck.http.models.jobs import JobsStored, JobStored, NewJobBody, NewJobsBody
from unstuck.http.problems import Problem, problem_of
from unstuck.store.records import Enqueued, NewJob

router = api_router("jobs")

Enqueuer = Annotated[Caller, Depends(needs(Scope.ENQUEUE))]
_THERE = {"model": JobStored, "description": "It was there already: sent again, or `unique_key` is in use."}


@router.post("/jobs", summary="Enqueue a job", status_code=201, response_model=JobStored, responses={200: _THERE})
def enqueue(body: NewJobBody, desk: AtDesk, caller: Enqueuer, idempotency_key: IdempotencyKey = None) -> Response:
    """Store a job; it is durable when the answer comes. Tasks are those that living or past workers know."""
    jobs = _build(desk, caller, [body])
    stored, repeated = _store(desk, caller, "one", idempotency_key, jobs)
    view = _views(desk, jobs, stored)[0]
    headers = {"Location": f"/api/v1/jobs/{stored[0].job_id}", **(REPEATED if repeated else {})}
    return answer(view, 201 if stored[0].fresh and not repeated else 200, headers)


@router.post(
    "/jobs/batch",
    summary="Enqueue many jobs, all or none",
    status_code=201,
    response_model=JobsStored,
    responses={200: {"model": JobsStored, "description": "The request was sent again, and stored nothing."}},
)
def enqueue_batch(
    body: NewJobsBody, desk: AtDesk, caller: Enqueuer, idempotency_key: IdempotencyKey = None
) -> Response:
    """Store jobs in one commit. Where one cannot be stored none is, and `at` in the problem is its place (from 0)."""
    jobs = _build(desk, caller, body.jobs)
    stored, repeated = _store(desk, caller, "batch", idempotency_key, jobs)
    view = {"jobs": _views(desk, jobs, stored)}
    return answer(view, 200 if repeated else 201, REPEATED if repeated else None)


def _build(desk: Desk, caller: Caller, bodies: Sequence[NewJobBody]) -> list[NewJob]:
    build = builder(desk.ledger, desk.settings, caller, mark_of(caller))
    jobs = []
    for place, body in enumerate(bodies):
        try:
            jobs.append(build(body))
        except UnstuckError as error:
            # No name for it here: an error that its own frame holds keeps the whole body in memory.
            raise _at_place(place, error) from error
    return jobs


def _at_place(place: int, error: UnstuckError) -> Problem:
    problem = problem_of(error)
    problem.facts["at"] = place
    return problem


def _store(
    desk: Desk, caller: Caller, kind: str, key: str | None, jobs: list[NewJob]
) -> tuple[Sequence[Enqueued], bool]:
    parts = desk.counter.parts()
    stored: Sequence[Enqueued]
    repeated = False
    if key is None:
        stored = parts.coalescer.enqueue(jobs)
    else:
        once = parts.ledger.enqueue_once(request_of(caller, key, kind, _asked(jobs)), jobs)
        if not once.stored:
            raise used_before()
        stored, repeated = once.stored, once.repeated
    if not repeated:
        parts.ringer.ring({f"queue:{job.queue}" for job in jobs if job.run_at is None and job.delay_s == 0})
    return stored, repeated


def _asked(jobs: Sequence[NewJob]) -> list[tuple[object, ...]]:
    # Not the policy: a worker with new code may have come in between, and it is the same request all the same.
    return [
        (job.task, job.queue, job.payload, job.priority, job.delay_s, job.run_at, job.unique_key, _unique(job))
        for job in jobs
    ]


def _unique(job: NewJob) -> tuple[object, ...]:
    more = job.more
    return () if more is None else (more.unique, more.unique_for_s, more.on_duplicate)


def _views(desk: Desk, jobs: Sequence[NewJob], stored: Sequence[Enqueued]) -> list[dict[str, object]]:
    warnings = desk.counter.parts().lookout.warnings(jobs)
    return [
        {"id": item.job_id, "task": job.task, "queue": job.queue, "fresh": item.fresh, "warning": warning}
        for job, item, warning in zip(jobs, stored, warnings, strict=True)
    ]
