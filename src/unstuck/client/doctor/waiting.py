"""Find jobs that are ready and wait, and say for what: a worker, a task, or an operator."""

from collections.abc import Iterator

from unstuck.client.doctor.codes import Code, Severity
from unstuck.client.doctor.facts import Facts, Limits
from unstuck.client.doctor.finding import Finding, capital, count, info, problem, warning
from unstuck.client.explaining import Reason, find_obstacle
from unstuck.domain.durations import brief
from unstuck.store.diagnosis import COUNT_LIMIT, Diagnosis, JobGroup, QueueLook, TaskLook

_SEVERITIES = {
    Code.NO_WORKER_FOR_QUEUE: Severity.PROBLEM,
    Code.TASK_UNKNOWN: Severity.PROBLEM,
    Code.WORKERS_LEAVING: Severity.WARNING,
    Code.WORKERS_DISABLED: Severity.PROBLEM,
    Code.QUEUE_PAUSED: Severity.WARNING,
}


def severity_of(code: Code) -> Severity:
    """Say how bad it is when jobs meet this obstacle."""
    return _SEVERITIES.get(code, Severity.PROBLEM)


def check_waiting(facts: Facts, diagnosis: Diagnosis, _limits: Limits) -> Iterator[Finding]:
    for queue in diagnosis.queues:
        yield from _check_queue(facts, queue)
    yield from (_overdue(group) for group in diagnosis.overdue)
    yield from (_quarantined(group) for group in diagnosis.quarantined)


def _check_queue(facts: Facts, queue: QueueLook) -> Iterator[Finding]:
    if not queue.ready:
        yield info(
            Code.QUEUE_PAUSED,
            f"Queue {queue.name!r} is paused",
            "An operator paused it; nothing waits in it.",
            f"`unstuck resume {queue.name}` when its jobs may run again.",
            queue=queue.name,
            ready=0,
        )
        return
    per_queue = False
    for task in queue.tasks:
        reason = find_obstacle(queue.name, task.task, queue.paused, facts.workers)
        if reason is None:
            continue
        if reason.code in (Code.TASK_UNKNOWN, Code.WORKERS_LEAVING, Code.WORKERS_DISABLED):
            yield _of_task(queue, task, reason)
        elif not per_queue:
            # The same for every job of the queue: said once.
            per_queue = True
            yield _of_queue(queue, reason)


def _of_queue(queue: QueueLook, reason: Reason) -> Finding:
    first = min(queue.tasks, key=lambda task: task.first_id)
    more = " or more" if queue.ready >= COUNT_LIMIT else ""
    waited_s = max(task.waited_s for task in queue.tasks)
    return Finding(
        reason.code,
        severity_of(reason.code),
        f"{queue.ready:,}{more} ready {'job waits' if queue.ready == 1 else 'jobs wait'} in queue {queue.name!r}",
        f"{reason.why}. Example: job {first.first_id}; the oldest has waited for {brief(waited_s)}.",
        f"{capital(reason.cure)}.",
        {"queue": queue.name, "ready": queue.ready, "example": first.first_id, "waited_s": round(waited_s, 1)},
    )


def _of_task(queue: QueueLook, task: TaskLook, reason: Reason) -> Finding:
    looked_at = sum(look.count for look in queue.tasks)
    least = "At least " if queue.ready > looked_at else ""
    noun = "job waits" if task.count == 1 else "jobs wait"
    return Finding(
        reason.code,
        severity_of(reason.code),
        f"{least}{task.count:,} ready {noun} for task {task.task!r} in queue {queue.name!r}",
        f"{reason.why}. Example: job {task.first_id}; the oldest has waited for {brief(task.waited_s)}.",
        f"{capital(reason.cure)}.",
        {
            "queue": queue.name,
            "task": task.task,
            "ready": task.count,
            "example": task.first_id,
            "waited_s": round(task.waited_s, 1),
        },
    )


def _overdue(group: JobGroup) -> Finding:
    return problem(
        Code.DUE_BUT_WAITING,
        f"{count(group.count, 'job')} of task {group.task!r} in queue {group.queue!r} "
        f"{'is' if group.count == 1 else 'are'} due and not made ready",
        f"The oldest was due {brief(group.by_s)} ago; whoever sweeps makes due jobs ready. "
        f"Example: job {group.example_id}.",
        "Start a worker, or `unstuck reaper`.",
        **_facts(group),
    )


def _quarantined(group: JobGroup) -> Finding:
    return warning(
        Code.QUARANTINED,
        f"{count(group.count, 'job')} of task {group.task!r} in queue {group.queue!r} "
        f"{'is' if group.count == 1 else 'are'} quarantined",
        f"The process that ran it died more often than its max_crash_retries allow. Example: job {group.example_id}.",
        f"Look with `unstuck why {group.example_id}`, mend the cause, then "
        f"`unstuck quarantine release {group.example_id}`.",
        **_facts(group),
    )


def _facts(group: JobGroup) -> dict[str, object]:
    return {
        "queue": group.queue,
        "task": group.task,
        "count": group.count,
        "example": group.example_id,
        "by_s": round(group.by_s, 1),
    }
