"""What the doctor looks at, gathered at one visit, and from where on something is worth a word."""

from typing import Literal

import msgspec

from unstuck.config import Settings
from unstuck.domain.states import LIVING
from unstuck.notify.failures import NO_FAILURES, Failures
from unstuck.store.diagnosis import Blocker, Diagnosis
from unstuck.store.records import LineRecord, ScheduleRecord, TaskRecord, WorkerRecord, WorkflowRecord

TroubleKind = Literal["unreachable", "busy", "standby", "none", "behind", "ahead", "forked"]


class Limits(msgspec.Struct, frozen=True):
    """From where on the doctor speaks up."""

    failing_share: float = 0.2
    """A task of whose jobs this share failed lately is worth a warning."""
    mostly_failing_share: float = 0.5
    """A task of whose jobs this share failed lately is a problem."""
    dropped_s: float = 3600.0
    """How long messages that a broker dropped are worth a warning."""
    far_s: float = 86_400.0
    """A job scheduled further off is worth a mention."""
    soon_s: float = 3600.0
    """A job that is due by then, and that nobody could take, is worth a warning; a later one is only mentioned."""
    late_s: float = 30.0
    """A job that has been due for so long and is not ready was forgotten."""
    clock_s: float = 2.0
    large_step_s: float = 60.0
    """A clock that was set by more is worth a warning; a smaller step is only mentioned."""
    recent_s: float = 86_400.0
    """How long a step of the clock and an outage are worth a mention."""
    blocking_s: float = 5.0
    """A transaction that has locked something of the ledger should have ended by then."""
    snapshot_s: float = 300.0
    slot_behind_xacts: int = 1_000_000
    settling_s: float = 10.0
    """A reaper at work has settled what a dead worker held by then."""
    overkept_s: float = 600.0
    """Retention looks once a minute: rows that are past their time for longer say that it does not keep up."""
    dead_rows: int = 50_000
    unswept_s: float = 600.0
    """Vacuum that came by more recently is at work on it."""
    free_bytes: int = 256 * 1024 * 1024
    wal_bytes: int = 256 * 1024 * 1024
    stuck_pages: int = 2_000


class Trouble(msgspec.Struct, frozen=True):
    """Why the ledger could not be looked at."""

    kind: TroubleKind
    message: str


class Standstill(msgspec.Struct, frozen=True):
    """Two looks at a worker that had free slots while jobs it knows were ready, or held some that it did not run."""

    before: WorkerRecord
    after: WorkerRecord
    apart_s: float
    ready_ids: tuple[int, ...]
    """The first in line at the first look."""
    left_ids: tuple[int, ...]
    """Those of them that were still ready at the second."""
    queues: tuple[str, ...]


class Host(msgspec.Struct, frozen=True):
    """The machine that the doctor stands on."""

    name: str
    containment: str = ""
    oom_group: bool | None = None


class Facts(msgspec.Struct, frozen=True):
    settings: Settings
    host: Host
    trouble: Trouble | None = None
    diagnosis: Diagnosis | None = None
    workers: tuple[WorkerRecord, ...] = ()
    standstills: tuple[Standstill, ...] = ()
    paused: tuple[WorkflowRecord, ...] = ()
    """Workflows that wait for an operator, the newest first, with their nodes."""
    schedules: tuple[ScheduleRecord, ...] = ()
    lines: tuple[LineRecord, ...] = ()
    """Lines in which somebody stands, as far as one looks."""
    tasks: tuple[TaskRecord, ...] = ()
    failures: Failures = NO_FAILURES
    dropped: dict[str, int] = {}
    """Messages that the ZeroMQ broker dropped lately, by why."""
    """Tasks and schedules whose jobs fail."""
    blockers: tuple[Blocker, ...] = ()
    """Transactions that hold locks of the ledger, known even if nothing else can be read."""

    @property
    def living(self) -> list[WorkerRecord]:
        return [worker for worker in self.workers if worker.state in LIVING]
