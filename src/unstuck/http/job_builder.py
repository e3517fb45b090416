"""Build jobs from what came over HTTP: for those who enqueue, and for workers whose jobs are followed by others."""

from collections.abc import Callable

import msgspec

from unstuck.client.enqueue import EnqueueOptions, build_job, check_queue, find_task, load_tasks
from unstuck.config import Settings
from unstuck.domain.api_tokens import Caller
from unstuck.domain.policy import decode_policy
from unstuck.http.auth.callers import may_limit, own_key
from unstuck.http.problems import Problem
from unstuck.http.schemas import NewJobBody
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.jobs import NewJob


def builder(ledger: Ledger, settings: Settings, caller: Caller, mark: str) -> Callable[[NewJobBody], NewJob]:
    """Return what turns a body of this caller into a job that is marked as enqueued by `mark`, or raises what is wrong
    with it."""
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
                queues.update(queue.name for queue in ledger.queues())
            check_queue(options.queue, queues)
        job = build_job(
            task=task.name,
            queue=task.queue,
            policy=decode_policy(task.policy),
            options=options,
            args=tuple(body.args),
            kwargs=body.kwargs,
            limit_bytes=settings.max_payload_bytes,
            known_queues=None,
        )
        if body.concurrency_key is not None and not may_limit(caller):
            job = _with_limit_that_is_there(ledger, job)
        return msgspec.structs.replace(job, enqueued_by=mark, unique_key=own_key(caller, job.unique_key))

    return build


def _with_limit_that_is_there(ledger: Ledger, job: NewJob) -> NewJob:
    """Return a job that takes the limit of its key as it is; the limit of its task counts for a new key alone.

    Else a caller could name the key of others with a task that has another limit."""
    if job.more is None or job.more.line_limit is None or not ledger.concurrency_keys(job.more.line):
        return job
    return msgspec.structs.replace(job, more=msgspec.structs.replace(job.more, line_limit=None))


def _limit_refused() -> Problem:
    return Problem(
        403,
        "forbidden",
        "This token lacks the scope 'operate', so it cannot set a concurrency_limit: others share the key.",
        cure="Leave the limit out: the task has one. Or use a token with `operate`.",
    )
