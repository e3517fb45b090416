"""Build jobs from what came over HTTP: for those who enqueue, and for workers whose jobs are followed by others."""

from collections.abc import Callable

import msgspec

from unstuck.client.enqueue import EnqueueOptions, build_job, check_queue, find_task, load_tasks
from unstuck.config import Settings
from unstuck.domain.api_tokens import Caller
from unstuck.domain.policy import decode_policy
from unstuck.http.auth.callers import own_key
from unstuck.http.schemas import NewJobBody
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.jobs import NewJob


def builder(ledger: Ledger, settings: Settings, caller: Caller, mark: str) -> Callable[[NewJobBody], NewJob]:
    """Return what turns a body of this caller into a job that is marked as enqueued by `mark`, or raises what is wrong
    with it."""
    tasks = load_tasks(ledger)
    queues: set[str] = set()

    def build(body: NewJobBody) -> NewJob:
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
        return msgspec.structs.replace(job, enqueued_by=mark, unique_key=own_key(caller, job.unique_key))

    return build
