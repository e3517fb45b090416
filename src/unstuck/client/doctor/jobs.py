"""Checks of jobs: waiting, scheduled, held by a concurrency key, in paused workflows, due by a schedule."""

from collections.abc import Iterator, Sequence

from unstuck.client.doctor.facts import Facts, Thresholds
from unstuck.client.doctor.findings import Finding, capital, count, info, named, problem, warning
from unstuck.client.reasons import Reason, find_obstacle, is_healthy
from unstuck.client.views import workers_firing
from unstuck.client.workflows.outline import paused_nodes
from unstuck.client.workflows.text import waits_for
from unstuck.domain.conditions import Code, Severity
from unstuck.domain.states import JobState
from unstuck.domain.units import brief
from unstuck.ledger.contract.diagnosis import COUNT_LIMIT, LOOK_JOBS, Diagnosis, JobGroup, QueueBacklog, TaskBacklog
from unstuck.ledger.contract.queues import KeyRecord
from unstuck.ledger.contract.schedules import ScheduleRecord
from unstuck.ledger.contract.workflows import WorkflowRecord

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


def check_waiting(facts: Facts, diagnosis: Diagnosis, _limits: Thresholds) -> Iterator[Finding]:
    for queue in diagnosis.queues:
        yield from _check_queue(facts, queue)
    yield from (_overdue_jobs(group) for group in diagnosis.overdue)
    yield from (_quarantined(group) for group in diagnosis.quarantined)


def _check_queue(facts: Facts, queue: QueueBacklog) -> Iterator[Finding]:
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


def _of_queue(queue: QueueBacklog, reason: Reason) -> Finding:
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


def _of_task(queue: QueueBacklog, task: TaskBacklog, reason: Reason) -> Finding:
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


def _overdue_jobs(group: JobGroup) -> Finding:
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
        f"Look with `unstuck why {group.example_id}`, mend the cause, then `unstuck retry {group.example_id}`.",
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


def check_scheduled(facts: Facts, diagnosis: Diagnosis, limits: Thresholds) -> Iterator[Finding]:
    yield from _check_far(diagnosis, limits)
    yield from _check_unserved(facts, diagnosis, limits)


def _check_far(diagnosis: Diagnosis, limits: Thresholds) -> Iterator[Finding]:
    by_queue: dict[str, list[JobGroup]] = {}
    for group in diagnosis.scheduled:
        by_queue.setdefault(group.queue, []).append(group)
    for queue, groups in by_queue.items():
        number = sum(group.count for group in groups)
        furthest = max(groups, key=lambda group: group.by_s)
        yield info(
            Code.SCHEDULED_FAR_OFF,
            capital(f"{_least(diagnosis.scheduled)}{count(number, 'job')} in queue {queue!r} ")
            + f"{'is' if number == 1 else 'are'} scheduled more than {brief(limits.far_s)} ahead",
            f"The furthest is due in {brief(furthest.by_s)}; of {named([group.task for group in groups])}. "
            f"Example: job {furthest.example_id}.",
            f"Nothing, if that is meant; else `unstuck cancel {furthest.example_id}` and enqueue it again.",
            queue=queue,
            tasks=[group.task for group in groups],
            count=number,
            example=furthest.example_id,
            by_s=round(furthest.by_s, 1),
        )


def _check_unserved(facts: Facts, diagnosis: Diagnosis, limits: Thresholds) -> Iterator[Finding]:
    """A queue that is paused is said so elsewhere, and so is an obstacle that ready jobs have met already."""
    paused = {queue.name for queue in diagnosis.queues if queue.paused}
    ready = {(queue.name, task.task) for queue in diagnosis.queues for task in queue.tasks}
    busy = {queue for queue, _ in ready}
    groups = {(group.queue, group.task): group for group in (*diagnosis.scheduled, *diagnosis.coming)}
    alike: dict[tuple[str, str], tuple[Reason, list[JobGroup]]] = {}
    for (queue, task), group in groups.items():
        reason = find_obstacle(queue, task, queue in paused, facts.workers)
        if reason is None or reason.code is Code.QUEUE_PAUSED or (queue, task) in ready:
            continue
        per_queue = reason.code is Code.NO_WORKER_FOR_QUEUE
        if not (per_queue and queue in busy):
            alike.setdefault((queue, "" if per_queue else task), (reason, []))[1].append(group)
    for reason, unserved in alike.values():
        yield _unserved(diagnosis, limits, reason, unserved)


def _unserved(diagnosis: Diagnosis, limits: Thresholds, reason: Reason, groups: Sequence[JobGroup]) -> Finding:
    soonest = min(groups, key=lambda group: group.by_s)
    number = sum(group.count for group in groups)
    # There is time to mend it, so it is no problem yet; and where workers come and go with their jobs it never is one.
    say = warning if soonest.by_s <= limits.soon_s else info
    verb, them = ("is", "it") if number == 1 else ("are", "them")
    return say(
        Code.SCHEDULED_UNSERVED,
        capital(f"{_least(diagnosis.coming)}{count(number, 'job')} in queue {soonest.queue!r} ")
        + f"{verb} scheduled, and as it is now nobody would take {them}",
        f"{reason.why}. The first is due in {brief(soonest.by_s)}: job {soonest.example_id} ({soonest.task}).",
        f"Before then, {reason.cure}.",
        queue=soonest.queue,
        tasks=sorted(group.task for group in groups),
        count=number,
        example=soonest.example_id,
        by_s=round(soonest.by_s, 1),
        reason=reason.code.value,
    )


def _least(groups: Sequence[JobGroup]) -> str:
    # No more than so many are looked at; there may be more of them.
    return "at least " if sum(group.count for group in groups) >= LOOK_JOBS else ""


def check_concurrency_keys(facts: Facts, diagnosis: Diagnosis, _limits: Thresholds) -> Iterator[Finding]:
    paused = {queue.name for queue in diagnosis.queues if queue.paused}
    for line in facts.concurrency_keys:
        if line.blocked == 0 or not line.holders:
            continue
        reasons = [_obstacle(facts, one.queue, one.queue in paused) for one in line.holders if _waits(one.state)]
        stuck = [reason for reason in reasons if reason is not None]
        if len(stuck) == len(line.holders):
            yield _stuck(line, stuck[0])


def _waits(state: str) -> bool:
    return state == JobState.PENDING


def _obstacle(facts: Facts, queue: str, paused: bool) -> Reason | None:
    # Whichever task it is: one that some worker of the queue knows.
    known = [task for worker in facts.workers if is_healthy(worker) and queue in worker.queues for task in worker.tasks]
    return find_obstacle(queue, known[0] if known else "", paused, facts.workers)


def _stuck(line: KeyRecord, reason: Reason) -> Finding:
    first = line.holders[0]
    return warning(
        Code.CONCURRENCY_KEY_STUCK,
        f"{count(line.blocked, 'job')} of key {line.key!r} {'waits' if line.blocked == 1 else 'wait'} behind job "
        f"{first.job_id}, which nobody can take",
        f"It has a place of the line and waits in queue {first.queue!r}: {reason.why[0].lower()}{reason.why[1:]}.",
        f"{capital(reason.cure)}; or `unstuck cancel {first.job_id}` gives its place to the next.",
        line=line.key,
        blocked=line.blocked,
        example=first.job_id,
        queue=first.queue,
    )


def check_workflows(facts: Facts, _diagnosis: Diagnosis, _limits: Thresholds) -> Iterator[Finding]:
    yield from (workflow_paused(workflow) for workflow in facts.paused)


def workflow_paused(workflow: WorkflowRecord) -> Finding:
    return warning(
        Code.WORKFLOW_PAUSED,
        f"Workflow {workflow.id} ({workflow.name}) is paused",
        waits_for(workflow),
        f"`unstuck workflows retry {workflow.id}` tries it again, `unstuck workflows resume {workflow.id}` goes on "
        f"past it, `unstuck workflows cancel {workflow.id}` gives it up.",
        workflow=workflow.id,
        name=workflow.name,
        nodes=[node.name for node in paused_nodes(workflow)],
    )


def check_schedules(facts: Facts, diagnosis: Diagnosis, limits: Thresholds) -> Iterator[Finding]:
    known = {task for worker in facts.living for task in worker.tasks}
    for record in facts.schedules:
        if record.paused:
            yield info(
                Code.SCHEDULE_PAUSED,
                f"Schedule {record.name!r} is paused",
                f"{record.paused_by or 'Somebody'} stopped it; it enqueues nothing until it goes on.",
                f"`unstuck schedules resume {record.name}`, when it shall.",
                schedule=record.name,
            )
        elif facts.living and not workers_firing(record, facts.workers):
            yield _unknown(record)
        elif facts.living and record.task not in known:
            yield warning(
                Code.SCHEDULE_TASK_UNKNOWN,
                f"Schedule {record.name!r} enqueues {record.task!r}, and no living worker knows that task",
                "Its jobs would wait until a worker comes that does.",
                f"Start a worker whose app has the task, or `unstuck schedules remove {record.name}`.",
                schedule=record.name,
                task=record.task,
            )
        elif record.next_at is not None and diagnosis.now_at - record.next_at > limits.late_s:
            yield _overdue_schedule(facts, record, diagnosis.now_at - record.next_at)


def _unknown(record: ScheduleRecord) -> Finding:
    return problem(
        Code.SCHEDULE_UNKNOWN,
        f"No living worker knows schedule {record.name!r}",
        f"It stood in the code of a worker that is gone ({record.timing}), and those that live have it not, or "
        "otherwise. A schedule that was taken out of the code stops, and stays in the list until it is removed.",
        f"Start a worker with that code, or `unstuck schedules remove {record.name}`.",
        schedule=record.name,
    )


def _overdue_schedule(facts: Facts, record: ScheduleRecord, late_s: float) -> Finding:
    why = (
        "Workers that know it live, and none has fired it: their logs say why (`A schedule cannot be fired`)."
        if facts.living
        else "No worker lives, and the workers keep the clock."
    )
    return problem(
        Code.SCHEDULE_OVERDUE,
        f"Schedule {record.name!r} has been due for {brief(late_s)}",
        why,
        f"Start a worker; it makes up for what was missed by the rule catch_up={record.catch_up}.",
        schedule=record.name,
        late_s=round(late_s, 1),
    )
