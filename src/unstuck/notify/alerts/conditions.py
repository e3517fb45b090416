"""The kinds of alerts: the events they are made of, and conditions that last."""

from collections.abc import Collection, Iterator, Sequence
from enum import StrEnum

import msgspec

from unstuck.config import Alerts
from unstuck.domain.conditions import NO_REAPER, reaper_is_missing, why_reaper_is_missing, why_unserved
from unstuck.domain.liveness import silence
from unstuck.domain.states import WorkerState
from unstuck.domain.units import brief
from unstuck.ledger.contract.diagnosis import COUNT_LIMIT, QueueBacklog
from unstuck.ledger.contract.events import ConditionChange, ConditionLook, ConditionRecord, LateWorker
from unstuck.notify.failures import NO_FAILURES, Example, Failures


class AlertKind(StrEnum):
    WORKER_DIED = "worker_died"
    NO_WORKERS = "no_workers"
    QUARANTINED = "quarantined"
    CRASH_LOOP = "crash_loop"
    WORKFLOW_PAUSED = "workflow_paused"
    BACKLOG_OLD = "backlog_old"
    HEARTBEAT_LATE = "heartbeat_late"
    NO_REAPER = "no_reaper"
    TASK_FAILING = "task_failing"
    SCHEDULE_FAILING = "schedule_failing"


class Phase(StrEnum):
    BEGUN = "begun"
    """Also for what has no end: a death is a death."""
    STILL = "still"
    OVER = "over"


class Topic(msgspec.Struct, frozen=True, order=True):
    """What one part of a message is about."""

    kind: AlertKind
    phase: Phase


CONDITIONS = (
    *(AlertKind.NO_WORKERS, AlertKind.BACKLOG_OLD, AlertKind.HEARTBEAT_LATE, AlertKind.NO_REAPER),
    *(AlertKind.TASK_FAILING, AlertKind.SCHEDULE_FAILING),
)
"""What begins, lasts and ends. Their events have the same name, with `_still` and `_over` for what follows."""

TOPICS = {
    "worker_dead": Topic(AlertKind.WORKER_DIED, Phase.BEGUN),
    "quarantined": Topic(AlertKind.QUARANTINED, Phase.BEGUN),
    "crash_loop": Topic(AlertKind.CRASH_LOOP, Phase.BEGUN),
    "workflow_paused": Topic(AlertKind.WORKFLOW_PAUSED, Phase.BEGUN),
    **{kind.value: Topic(kind, Phase.BEGUN) for kind in CONDITIONS},
    **{f"{kind}_still": Topic(kind, Phase.STILL) for kind in CONDITIONS},
    **{f"{kind}_over": Topic(kind, Phase.OVER) for kind in CONDITIONS},
}

IN_ORDER = (
    *(Topic(kind, Phase.BEGUN) for kind in AlertKind),
    *(Topic(kind, Phase.STILL) for kind in CONDITIONS),
    *(Topic(kind, Phase.OVER) for kind in CONDITIONS),
)
"""The news first, what is over last."""


def events_of(told: Collection[str]) -> frozenset[str]:
    """Give the kinds of events that these alerts are made of."""
    return frozenset(event for event, topic in TOPICS.items() if topic.kind in told)


LATE_FOR_S = 5.0
"""A worker that is suspect is mostly dead a moment later, and that is told then."""
WHOLE_LEDGER = "ledger"


class Condition(msgspec.Struct, frozen=True):
    """A condition as it is now."""

    kind: AlertKind
    about: str
    message: str
    after_s: float = 0.0
    """It is worth a word when it was seen for so long."""
    worker_id: str | None = None


def find_conditions(
    look: ConditionLook,
    rules: Alerts,
    check_interval_s: float,
    failures: Failures = NO_FAILURES,
    known: Sequence[ConditionRecord] = (),
) -> list[Condition]:
    """Give every condition that holds, whether it is to be told or not: the ledger's events are for all."""
    return [
        *_of_queues(look, rules),
        *_of_heartbeats(look),
        *_of_reaper(look, check_interval_s),
        *_of_failures(failures, known),
    ]


def compare(
    found: Sequence[Condition], known: Sequence[ConditionRecord], look: ConditionLook, rules: Alerts
) -> list[ConditionChange]:
    """Give what changed since the conditions in the ledger were written."""
    before = {(record.kind, record.about): record for record in known if record.kind in CONDITIONS}
    changes = []
    for one in found:
        record = before.pop((one.kind, one.about), None)
        if record is None:
            changes.append(_change("seen" if one.after_s > 0 else "begun", one))
        elif record.begun_at is None:
            if not 0 <= look.now_at - record.seen_at < one.after_s:
                changes.append(_change("begun", one))
        elif look.now_at - (record.reminded_at or record.begun_at) >= rules.remind_every_s:
            changes.append(_change("lasting", one))
    return changes + [_over(record, look) for record in before.values()]


def _of_queues(look: ConditionLook, rules: Alerts) -> Iterator[Condition]:
    for queue in look.queues:
        if not queue.ready or queue.paused:
            # Paused is what an operator said, and no surprise.
            continue
        waited_s = max((task.waited_s for task in queue.tasks), default=0.0)
        if queue.name not in look.served:
            message = f"{why_unserved(queue.name, look.able)}; {_waiting(queue, waited_s)}"
            yield Condition(AlertKind.NO_WORKERS, queue.name, message, rules.unserved_after_s)
        elif waited_s >= rules.backlog_age_s:
            message = f"Queue {queue.name!r} has a backlog: {_waiting(queue, waited_s)}"
            yield Condition(AlertKind.BACKLOG_OLD, queue.name, message)


def _waiting(queue: QueueBacklog, waited_s: float) -> str:
    more = " or more" if queue.ready >= COUNT_LIMIT else ""
    noun = "ready job waits" if queue.ready == 1 else "ready jobs wait"
    return f"{queue.ready:,}{more} {noun}, the oldest for {brief(waited_s)}"


def _of_heartbeats(look: ConditionLook) -> Iterator[Condition]:
    for worker in look.late:
        yield Condition(AlertKind.HEARTBEAT_LATE, worker.id, _late(worker), LATE_FOR_S, worker.id)


def _late(worker: LateWorker) -> str:
    state = " and is suspect" if worker.state is WorkerState.SUSPECT else ""
    return f"Worker {worker.name} on {worker.host}: {silence(worker.silent_s)}{state}"


def _of_reaper(look: ConditionLook, check_interval_s: float) -> Iterator[Condition]:
    if not look.living and not look.held:
        # Nobody to watch over. Jobs that wait for a worker are found as such.
        return
    interval_s = max(check_interval_s, look.check_interval_s or 0.0)
    if reaper_is_missing(look.unswept_s, interval_s, [] if look.eldest_s is None else [look.eldest_s]):
        message = f"{NO_REAPER}: {why_reaper_is_missing(look.unswept_s, interval_s)}"
        yield Condition(AlertKind.NO_REAPER, WHOLE_LEDGER, message)


def _of_failures(failures: Failures, known: Sequence[ConditionRecord]) -> Iterator[Condition]:
    for task in failures.tasks:
        message = f"{task}{_lately(failures.examples.get(task.task))}"
        yield Condition(AlertKind.TASK_FAILING, task.task, message)
    for schedule in failures.schedules:
        message = f"The last job of schedule {schedule.name!r} failed{_lately(schedule.example)}"
        yield Condition(AlertKind.SCHEDULE_FAILING, schedule.name, message)
    for record in known:
        if record.kind == AlertKind.SCHEDULE_FAILING and record.about in failures.open_schedules:
            # Its next job has not ended: that it failed stays the last that is known.
            yield Condition(AlertKind.SCHEDULE_FAILING, record.about, record.message)


def _lately(example: Example | None) -> str:
    return "" if example is None or example.error is None else f"; lately job {example.job_id}: {example.error}"


def _change(step: str, one: Condition) -> ConditionChange:
    return msgspec.convert(
        {"step": step, "kind": one.kind, "about": one.about, "message": one.message, "worker_id": one.worker_id},
        ConditionChange,
    )


def _over(record: ConditionRecord, look: ConditionLook) -> ConditionChange:
    worker_id = None
    match AlertKind(record.kind):
        case AlertKind.NO_WORKERS:
            message = f"Queue {record.about!r} has a worker again, or nothing waits in it any more"
        case AlertKind.BACKLOG_OLD:
            message = f"The backlog of queue {record.about!r} is gone"
        case AlertKind.HEARTBEAT_LATE:
            worker_id = record.about
            message = f"Worker {record.about} is late no more: it beat again, or it is gone"
        case AlertKind.TASK_FAILING:
            message = f"Task {record.about!r} fails no more than usual"
        case AlertKind.SCHEDULE_FAILING:
            message = f"The last job of schedule {record.about!r} succeeded, or the schedule is gone"
        case _:
            message = "Somebody looks for the dead again"
    begun_at = record.begun_at
    lasted = "" if begun_at is None else f" (after {brief(max(0.0, look.now_at - begun_at))})"
    return ConditionChange("over", record.kind, record.about, f"{message}{lasted}", worker_id)
