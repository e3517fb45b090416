"""Find jobs that wait for their time: those that are far off, and those that nobody could run when it comes."""

from collections.abc import Iterator, Sequence

from unstuck.client.doctor.codes import Code
from unstuck.client.doctor.facts import Facts, Limits
from unstuck.client.doctor.finding import Finding, capital, count, info, named, warning
from unstuck.client.explaining import Reason, find_obstacle
from unstuck.domain.durations import brief
from unstuck.store.diagnosis import LOOK_JOBS, Diagnosis, JobGroup


def check_scheduled(facts: Facts, diagnosis: Diagnosis, limits: Limits) -> Iterator[Finding]:
    yield from _check_far(diagnosis, limits)
    yield from _check_unserved(facts, diagnosis, limits)


def _check_far(diagnosis: Diagnosis, limits: Limits) -> Iterator[Finding]:
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


def _check_unserved(facts: Facts, diagnosis: Diagnosis, limits: Limits) -> Iterator[Finding]:
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


def _unserved(diagnosis: Diagnosis, limits: Limits, reason: Reason, groups: Sequence[JobGroup]) -> Finding:
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
