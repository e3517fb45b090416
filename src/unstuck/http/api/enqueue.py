"""Routes that enqueue one job or many, with an `Idempotency-Key`."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec
from fastapi import Depends, Header, Response

from unstuck.client.enqueue import EnqueueOptions, build_job, check_queue, find_task, load_tasks
from unstuck.domain.api_tokens import Caller, Scope
from unstuck.domain.policy import decode_policy
from unstuck.errors import UnstuckError
from unstuck.http.auth.callers import Requires, mark_of, may_limit, own_key
from unstuck.http.openapi import json_response
from unstuck.http.problems import Problem, problem_of
from unstuck.http.routing import api_router
from unstuck.http.schemas import JobsStored, JobStored, NewJobBody, NewJobsBody, RequestModel
from unstuck.http.services import Services, ServicesDep
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.jobs import Enqueued, NewJob, Request

KEPT_S = 24 * 3600.0
MAX_KEY_CHARS = 255
REPEATED = {"Idempotency-Replayed": "true"}
_encoder = msgspec.json.Encoder(order="deterministic")

IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=MAX_KEY_CHARS,
        description="A text of your own, new for each request. Sent again with the same key within a day, the request "
        "stores nothing and gets the first answer, also where the job has ended by then.",
    ),
]


def request_of(caller: Caller, key: str, kind: str, body: RequestModel) -> Request:
    """Return what tells this request from others: who sent it with which key, and all that it asks for.

    The body counts, not the jobs made of it: no option can be left out, and those that a task brings with it may have
    changed in between."""
    asked = _encoder.encode((kind, body.model_dump(exclude_defaults=True)))
    return Request(_hash(msgspec.msgpack.encode((caller.token_id, key))), _hash(asked), KEPT_S)


def used_before() -> Problem:
    return Problem(
        409,
        "key_used_before",
        "This Idempotency-Key came with another request within the last day.",
        cure="Use a new key for each request, and the same only to send the very same again.",
    )


def _hash(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


router = api_router("jobs")

Enqueuer = Annotated[Caller, Depends(Requires(Scope.ENQUEUE))]
_THERE = {"model": JobStored, "description": "It was there already: sent again, or `unique_key` is in use."}


@router.post("/jobs", summary="Enqueue a job", status_code=201, response_model=JobStored, responses={200: _THERE})
def enqueue(
    body: NewJobBody, services: ServicesDep, caller: Enqueuer, idempotency_key: IdempotencyKey = None
) -> Response:
    """Store a job; it is durable when the answer comes. Tasks are those that living or past workers know."""
    jobs = _build(services, caller, [body])
    stored, repeated = _store(services, caller, "one", idempotency_key, body, jobs)
    view = _views(services, jobs, stored)[0]
    headers = {"Location": f"/api/v1/jobs/{stored[0].job_id}", **(REPEATED if repeated else {})}
    return json_response(view, 201 if stored[0].fresh and not repeated else 200, headers)


@router.post(
    "/jobs/batch",
    summary="Enqueue many jobs, all or none",
    status_code=201,
    response_model=JobsStored,
    responses={200: {"model": JobsStored, "description": "The request was sent again, and stored nothing."}},
)
def enqueue_batch(
    body: NewJobsBody, services: ServicesDep, caller: Enqueuer, idempotency_key: IdempotencyKey = None
) -> Response:
    """Store jobs in one commit. Where one cannot be stored none is, and `at` in the problem is its place (from 0)."""
    jobs = _build(services, caller, body.jobs)
    stored, repeated = _store(services, caller, "batch", idempotency_key, body, jobs)
    view = {"jobs": _views(services, jobs, stored)}
    return json_response(view, 200 if repeated else 201, REPEATED if repeated else None)


def _build(services: Services, caller: Caller, bodies: Sequence[NewJobBody]) -> list[NewJob]:
    build = _builder(services, caller)
    jobs = []
    for place, body in enumerate(bodies):
        try:
            jobs.append(build(body))
        except Problem as problem:
            problem.facts["at"] = place
            raise
        except UnstuckError as error:
            # No name for it here: an error that its own frame holds keeps the whole body in memory.
            raise _at_place(place, error) from error
    return jobs


def _builder(services: Services, caller: Caller) -> Callable[[NewJobBody], NewJob]:
    """Return what turns a body of this caller into a job, or raises what is wrong with it."""
    ledger = services.ledger
    tasks = load_tasks(ledger)
    queues: set[str] = set()

    def build(body: NewJobBody) -> NewJob:
        if body.concurrency_limit is not None and not may_limit(caller):
            raise _limit_refused()
        task = find_task(tasks, body.task)
        named = body.model_dump(exclude={"task", "args", "kwargs"})
        options = EnqueueOptions.checked(None, named)
        if options.queue is not None and options.queue != task.queue:
            if options.queue not in queues:
                queues.update(queue.name for queue in ledger.queues.list())
            check_queue(options.queue, queues)
        job = build_job(
            task=task.name,
            queue=task.queue,
            policy=decode_policy(task.policy),
            options=options,
            args=tuple(body.args),
            kwargs=body.kwargs,
            limit_bytes=services.settings.max_payload_bytes,
            known_queues=None,
        )
        if body.concurrency_key is not None and not may_limit(caller):
            job = _with_limit_that_is_there(ledger, job)
        return msgspec.structs.replace(job, enqueued_by=mark_of(caller), unique_key=own_key(caller, job.unique_key))

    return build


def _with_limit_that_is_there(ledger: Ledger, job: NewJob) -> NewJob:
    """Return a job that takes the limit of its key as it is; the limit of its task counts for a new key alone.

    Else a caller could name the key of others with a task that has another limit."""
    if (
        job.more is None
        or job.more.concurrency_limit is None
        or not ledger.queues.concurrency_keys(job.more.concurrency_key)
    ):
        return job
    return msgspec.structs.replace(job, more=msgspec.structs.replace(job.more, concurrency_limit=None))


def _limit_refused() -> Problem:
    return Problem(
        403,
        "forbidden",
        "This token lacks the scope 'operate', so it cannot set a concurrency_limit: others share the key.",
        cure="Leave the limit out: the task has one. Or use a token with `operate`.",
    )


def _at_place(place: int, error: UnstuckError) -> Problem:
    problem = problem_of(error)
    problem.facts["at"] = place
    return problem


def _store(
    services: Services, caller: Caller, kind: str, key: str | None, body: RequestModel, jobs: list[NewJob]
) -> tuple[Sequence[Enqueued], bool]:
    parts = services.runtime.services()
    stored: Sequence[Enqueued]
    repeated = False
    if key is None:
        stored = parts.batcher.enqueue(jobs)
    else:
        once = parts.ledger.jobs.enqueue_once(request_of(caller, key, kind, body), jobs)
        if not once.stored:
            raise used_before()
        stored, repeated = once.stored, once.repeated
    if not repeated:
        parts.wakeups.send({f"queue:{job.queue}" for job in jobs if job.run_at is None and job.delay_s == 0})
    return stored, repeated


def _views(services: Services, jobs: Sequence[NewJob], stored: Sequence[Enqueued]) -> list[dict[str, object]]:
    warnings = services.runtime.services().no_worker_check.warnings(jobs)
    return [
        {"id": item.job_id, "task": job.task, "queue": job.queue, "fresh": item.fresh, "warning": warning}
        for job, item, warning in zip(jobs, stored, warnings, strict=True)
    ]
