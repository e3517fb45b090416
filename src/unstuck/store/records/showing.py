"""What people and their tools read: jobs, attempts, workers, queues, events."""

from collections.abc import Sequence
from typing import Any

import msgspec

from unstuck.domain.autopsy import Autopsy
from unstuck.domain.cursor import Cursor
from unstuck.domain.endings import JobError
from unstuck.domain.health import Disabled
from unstuck.domain.rules import RecoveryRules
from unstuck.domain.states import AttemptState, Door, JobState, WorkerState
from unstuck.store.records.watching import WorkerVerdict


class JobRecord(msgspec.Struct, frozen=True):
    id: int
    task: str
    queue: str
    state: JobState
    priority: int
    payload: bytes
    payload_type: str
    result: bytes | None
    error: JobError | None
    policy: bytes
    failures: int
    crash_count: int
    attempt: int
    unique_key: str | None
    cancel_requested: bool
    enqueued_at: float
    enqueued_by: str | None
    run_at: float
    claimed_at: float | None
    started_at: float | None
    finished_at: float | None
    worker_id: str | None
    token: int | None
    suspicions: int = 0
    alone: bool = False
    awaits: str | None = None
    """The signal that it waits for."""
    wakes: bool = True
    """False for one that waits for a signal however long it takes; else it goes on at `run_at` at the latest."""


class AttemptRecord(msgspec.Struct, frozen=True):
    token: int
    worker_id: str
    state: AttemptState
    claimed_at: float | None
    started_at: float | None
    ended_at: float | None
    code: str | None
    cause: str | None
    """The cause in words, or the error's message."""
    last_heartbeat_at: float | None
    heartbeat_deadline: float | None
    deadline: float | None
    autopsy: Autopsy | None = None
    """Why its process died or was ended; None where user code ended by itself."""


class Fate(msgspec.Struct, frozen=True):
    """What became of one attempt and of its job, without anything large."""

    job_id: int
    token: int
    state: JobState | None
    """Of the job now; None if there is no such job."""
    holder_token: int | None
    """Of the job's last attempt, which may be another one."""
    holder_id: str | None
    holder_name: str | None
    """None for a Python worker."""
    attempt: int
    started_at: float | None
    finished_at: float | None
    error_code: str | None
    worker_id: str | None
    """Whose this attempt was; None if the ledger knows of no such attempt."""
    ended_as: AttemptState | None
    """None while it goes on, and if it is unknown."""
    ended_code: str | None


def read_fate(row: Sequence[Any]) -> Fate:
    """Read the columns of `fates`, which are the same in both databases."""
    state = None if row[2] is None else JobState(row[2])
    ended_as = None if row[11] is None else AttemptState(row[11])
    return Fate(*(*row[:2], state, *row[3:11], ended_as, row[12]))


class Outcome(msgspec.Struct, frozen=True):
    """What somebody who waits needs."""

    job_id: int
    state: JobState
    result: bytes | None
    error: JobError | None


class EventRecord(msgspec.Struct, frozen=True):
    id: int
    at: float
    kind: str
    job_id: int | None
    worker_id: str | None
    message: str
    transaction: int = 0
    """What wrote it, in the order in which transactions began; on SQLite the id itself."""


class EventPage(msgspec.Struct, frozen=True):
    """The next events behind a cursor, and what the ledger knows of that cursor. All of it is one look."""

    events: list[EventRecord]
    """In the order of their transactions and ids."""
    running: frozenset[int]
    """Transactions that were open: they may still bring events."""
    is_known: bool
    """The event of the cursor is still there, and the same."""
    oldest_id: int | None
    """The lowest id that is left of all events."""

    def contradicts(self, cursor: Cursor) -> bool:
        """Return whether the event of the cursor was replaced, as by a failover that lost it. What retention removed
        contradicts nothing: it begins with the oldest."""
        return not self.is_known and self.oldest_id is not None and self.oldest_id <= cursor.id


class OutputRecord(msgspec.Struct, frozen=True):
    token: int
    stdout: bytes
    stderr: bytes


class WorkerRecord(msgspec.Struct, frozen=True):
    id: str
    name: str
    host: str
    pid: int
    state: WorkerState
    queues: tuple[str, ...]
    tasks: tuple[str, ...]
    concurrency: int
    created_at: float
    last_seen_at: float
    silent_s: float
    stopped_at: float | None
    running: int
    processed: int
    held: int
    version: str
    metadata: dict[str, Any]
    verdict: WorkerVerdict | None
    request: str | None
    heartbeat_interval_s: float
    suspect_after_s: float
    disabled: Disabled | None = None
    """Who switched it, or its host, off, and why."""
    door: Door = Door.PYTHON
    owner: str | None = None
    """The token that it came with, if any."""
    running_stale_after_s: float | None = None
    """Silent for this long, it loses running jobs that brought no timeout of their own."""
    rules: RecoveryRules | None = None
    """The recovery settings that it stored when it registered."""
    busy: int = 0
    """How many jobs it runs by the ledger, at this moment. `running` is what it said with its last heartbeat."""


class HostRecord(msgspec.Struct, frozen=True):
    """A host of which something was decided; the others need no row."""

    name: str
    disabled: Disabled | None


class QueueRecord(msgspec.Struct, frozen=True):
    name: str
    paused: bool
    pending: int
    """Ready to run now."""
    scheduled: int
    """Pending with a time in the future."""
    claimed: int
    running: int
    oldest_pending_s: float | None
    workers: int
    """Living workers that serve it."""
    waiting: int = 0
    """Gave their slots back, and wait for a time or a signal."""
    blocked: int = 0
    """Pending, and as many jobs of their concurrency key are at work as may be."""


class JobFilter(msgspec.Struct, frozen=True):
    states: tuple[JobState, ...] = ()
    queue: str | None = None
    task: str | None = None
    error: str | None = None
    older_than_s: float | None = None
    newer_than_s: float | None = None
    """Age is time since `enqueued_at`."""
    worker_id: str | None = None
    before_id: int | None = None
    from_id: int | None = None
    """None older than this one: whoever looks through many takes them bit by bit."""
    limit: int = 100
