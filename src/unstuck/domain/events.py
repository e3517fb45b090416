"""Name the facts worth telling, and gather bursts of them: a thousand deaths at once are one piece of news."""

from collections.abc import Iterable
from enum import StrEnum

import msgspec

from unstuck.domain.text import did_you_mean
from unstuck.errors import ConfigError

FIRST = 5
"""So many of a burst are told in full."""


class EventKind(StrEnum):
    """Every kind of event. Kinds that only a newer version knows are told all the same, as plain text."""

    # Written in the ledger.
    REQUEUED = "requeued"
    RETRYING = "retrying"
    RETRIED = "retried"
    FAILED = "failed"
    QUARANTINED = "quarantined"
    CANCELLED = "cancelled"
    CANCEL_REQUESTED = "cancel_requested"
    SUSPENDED = "suspended"
    """A job gave its slot back, and waits for a time or a signal."""
    SIGNALLED = "signalled"
    EXPIRED = "expired"
    """A job was not begun in time, and was cancelled."""
    LINE_LIMITED = "line_limited"
    LINE_REPAIRED = "line_repaired"
    """Somebody waited in a line at a free place, which should not be."""
    QUEUE_LIMITED = "queue_limited"
    WORKER_STARTED = "worker_started"
    WORKER_STILLBORN = "worker_stillborn"
    """A worker process of a supervisor ended before it had registered, so that no worker tells of it."""
    WORKER_SUSPECT = "worker_suspect"
    WORKER_RECOVERED = "worker_recovered"
    WORKER_DEAD = "worker_dead"
    WORKER_STOPPED = "worker_stopped"
    WORKER_DISABLED = "worker_disabled"
    WORKER_ENABLED = "worker_enabled"
    HOST_DISABLED = "host_disabled"
    HOST_ENABLED = "host_enabled"
    SCHEDULE_PAUSED = "schedule_paused"
    SCHEDULE_RESUMED = "schedule_resumed"
    SCHEDULE_REMOVED = "schedule_removed"
    SCHEDULE_RESTORED = "schedule_restored"
    """Its definition came from a worker that is gone, and a living worker put its own back."""
    SCHEDULE_MISSED = "schedule_missed"
    """Ticks were due while nobody was there, and not all of them are made up for."""
    SCHEDULE_SET_BACK = "schedule_set_back"
    """It had ticked by a clock that was far ahead, and goes on from now."""
    STACK = "stack"
    """Where a running job stood when somebody asked; the message is the stack."""
    LOOP_BLOCKED = "loop_blocked"
    """A job keeps the event loop that it shares with others from turning."""
    NO_WORKERS = "no_workers"
    """Somebody enqueued to a queue that no living worker serves, or jobs have waited in one; they stay queued."""
    NO_WORKERS_STILL = "no_workers_still"
    NO_WORKERS_OVER = "no_workers_over"
    CRASH_LOOP = "crash_loop"
    """A worker or host was switched off because it keeps crashing, or a supervisor slowed down replacing one."""
    BACKLOG_OLD = "backlog_old"
    BACKLOG_OLD_STILL = "backlog_old_still"
    BACKLOG_OLD_OVER = "backlog_old_over"
    HEARTBEAT_LATE = "heartbeat_late"
    HEARTBEAT_LATE_STILL = "heartbeat_late_still"
    HEARTBEAT_LATE_OVER = "heartbeat_late_over"
    NO_REAPER = "no_reaper"
    NO_REAPER_STILL = "no_reaper_still"
    NO_REAPER_OVER = "no_reaper_over"
    TASK_FAILING = "task_failing"
    """A large share of the jobs of a task failed lately."""
    TASK_FAILING_STILL = "task_failing_still"
    TASK_FAILING_OVER = "task_failing_over"
    SCHEDULE_FAILING = "schedule_failing"
    """The last job of a schedule failed."""
    SCHEDULE_FAILING_STILL = "schedule_failing_still"
    SCHEDULE_FAILING_OVER = "schedule_failing_over"
    WORKFLOW_PAUSED = "workflow_paused"
    """A node failed, and waits for an operator."""
    WORKFLOW_RESUMED = "workflow_resumed"
    WORKFLOW_REPAIRED = "workflow_repaired"
    """Something that should be impossible was found in a workflow, and repaired."""
    # Seen by following one job: what goes well is not written down as an event of its own.
    ENQUEUED = "enqueued"
    CLAIMED = "claimed"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    PROGRESS = "progress"
    # Of the stream itself.
    GAP = "gap"
    """The reader was too slow, or away for too long: some events were passed over."""


LEVELS = {
    "worker_dead": "problem",
    "worker_suspect": "problem",
    "failed": "problem",
    "quarantined": "problem",
    "no_workers": "problem",
    "workflow_paused": "problem",
    "task_failing": "problem",
    "schedule_failing": "problem",
    "workflow_repaired": "warning",
    "schedule_missed": "warning",
    "schedule_restored": "warning",
    "worker_stillborn": "warning",
    "requeued": "warning",
    "loop_blocked": "warning",
    "retrying": "warning",
    "worker_disabled": "warning",
    "host_disabled": "warning",
    "worker_started": "good",
    "worker_recovered": "good",
}
"""How bad a kind is; any other is plain news."""


def checked_kinds(kinds: Iterable[str]) -> frozenset[str]:
    """Return the kinds as a set. Raise ConfigError for one that does not exist: its events would never come."""
    chosen = frozenset(str(kind) for kind in kinds)
    for kind in sorted(chosen - set(EventKind)):
        raise ConfigError(f"There is no kind of event {kind!r}.{did_you_mean(kind, [one.value for one in EventKind])}")
    return chosen


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """A fact worth telling, or many of one kind that came together."""

    kind: str
    at: float
    """Seconds since 1970."""
    message: str
    id: int | None = None
    """Its number in the ledger; None for what was seen by following a job."""
    job_id: int | None = None
    worker_id: str | None = None
    cursor: str = ""
    """Give it as `after` to go on behind this event."""
    count: int = 1
    first: tuple["Event", ...] = ()
    """The first few, where this stands for many."""
    done: float | None = None
    total: float | None = None
    """Of `progress`."""


def gathered(events: Iterable[Event]) -> list[Event]:
    """Put events of one kind together; the order is that of the first of each kind."""
    kinds: dict[str, list[Event]] = {}
    for event in events:
        kinds.setdefault(event.kind, []).append(event)
    return [_as_one(group) for group in kinds.values()]


def _as_one(group: list[Event]) -> Event:
    if len(group) == 1:
        return group[0]
    last = group[-1]
    count = sum(event.count for event in group)
    first = tuple(event for one in group[:FIRST] for event in (one.first or (one,)))[:FIRST]
    names = ", ".join(event.worker_id or f"job {event.job_id}" for event in first if event.worker_id or event.job_id)
    more = f" and {count - len(first)} more" if count > len(first) else ""
    message = f"{count} times {last.kind}: {names}{more}" if names else f"{count} times {last.kind}: {last.message}"
    return Event(last.kind, last.at, message, last.id, cursor=last.cursor, count=count, first=first)
