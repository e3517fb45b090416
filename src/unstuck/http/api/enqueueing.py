"""Take jobs in: one, or many at once; a request that is sent again stores nothing twice."""

import hashlib
from collections.abc import Sequence
from typing import Annotated

import msgspec
from fastapi import Depends, Header, Response

from unstuck.domain.errors import UnstuckError
from unstuck.http.answers import answer
from unstuck.http.api.ownership import mark_of
from unstuck.http.bodies import api_router
from unstuck.http.building import builder
from unstuck.http.callers import Caller, Scope, needs
from unstuck.http.desk import AtDesk, Desk
from unstuck.http.models.jobs import JobsStored, JobStored, NewJobBody, NewJobsBody
from unstuck.http.problems import Problem, problem_of
from unstuck.store.records import Enqueued, NewJob, Request

KEPT_S = 24 * 3600.0
MAX_KEY_CHARS = 255
REPEATED = {"Idempotency-Replayed": "true"}

router = api_router("jobs")

Enqueuer = Annotated[Caller, Depends(needs(Scope.ENQUEUE))]
IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=MAX_KEY_CHARS,
        description="A text of your own, new for each request. Sent again with the same key within a day, the request "
        "stores nothing and gets the first answer, also where the job has ended by then.",
    ),
]
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
    build = builder(desk.ledger, desk.settings, mark_of(caller))
    jobs = []
    for place, body in enumerate(bodies):
        try:
            jobs.append(build(body))
        except UnstuckError as error:
            problem = problem_of(error)
            problem.facts["at"] = place
            raise problem from error
    return jobs


def _store(
    desk: Desk, caller: Caller, kind: str, key: str | None, jobs: list[NewJob]
) -> tuple[Sequence[Enqueued], bool]:
    parts = desk.counter.parts()
    stored: Sequence[Enqueued]
    repeated = False
    if key is None:
        stored = parts.coalescer.enqueue(jobs)
    else:
        once = parts.ledger.enqueue_once(_request(caller, kind, key, jobs), jobs)
        if not once.stored:
            raise Problem(
                422,
                "key_used_before",
                "This Idempotency-Key came with another request within the last day.",
                cure="Use a new key for each request, and the same only to send the very same again.",
            )
        stored, repeated = once.stored, once.repeated
    if not repeated:
        parts.ringer.ring({f"queue:{job.queue}" for job in jobs if job.run_at is None and job.delay_s == 0})
    return stored, repeated


def _request(caller: Caller, kind: str, key: str, jobs: Sequence[NewJob]) -> Request:
    # Not the policy: a worker with new code may have come in between, and it is the same request all the same.
    asked = [
        (job.task, job.queue, job.payload, job.priority, job.delay_s, job.run_at, job.unique_key, _unique(job))
        for job in jobs
    ]
    return Request(_hash((caller.token_id, key)), _hash((kind, asked)), KEPT_S)


def _unique(job: NewJob) -> tuple[object, ...]:
    more = job.more
    return () if more is None else (more.unique, more.unique_for_s, more.on_duplicate)


def _hash(value: object) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode(value)).digest()


def _views(desk: Desk, jobs: Sequence[NewJob], stored: Sequence[Enqueued]) -> list[dict[str, object]]:
    warnings = desk.counter.parts().lookout.warnings(jobs)
    return [
        {"id": item.job_id, "task": job.task, "queue": job.queue, "fresh": item.fresh, "warning": warning}
        for job, item, warning in zip(jobs, stored, warnings, strict=True)
    ]
