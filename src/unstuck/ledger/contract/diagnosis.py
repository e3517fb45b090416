"""Say what the doctor learns from the ledger itself: who waits, who sweeps, how the database is doing.

Every count is bounded: a ledger with a million jobs is looked at as quickly as one with ten.
"""

from typing import Literal

import msgspec

from unstuck.domain.watch_clock import Cause

COUNT_LIMIT = 10_000
"""Ready jobs of one queue are counted up to here; a count that reaches it means "so many or more"."""
LOOK_JOBS = 500
"""So many jobs at each end of a queue are looked at for their tasks: what nobody takes gathers at the head."""
LOOK_QUEUES = 200
LOOK_GROUPS = 50
LOOK_ERRORS = 5_000
"""So many of the newest jobs that went wrong are looked at for quarantined ones."""
LOOK_LATE = 1_000
"""So many workers that are late are named."""
SWEEP_TICKET = "sweep"
"""The ticket that the reaper takes for each sweep."""

WakeupState = Literal["works", "silent", "off", "pooled"]
SnapshotKind = Literal["session", "prepared", "slot"]
BlockerKind = Literal["session", "prepared", "process"]
RetentionKind = Literal["jobs", "events", "keys"]


class TaskBacklog(msgspec.Struct, frozen=True):
    """Ready jobs of one task among those that were looked at."""

    task: str
    count: int
    first_id: int
    """The one that would be claimed first."""
    waited_s: float
    """How long the oldest has been ready."""


class QueueBacklog(msgspec.Struct, frozen=True):
    """A queue in which jobs are ready, or which is paused."""

    name: str
    paused: bool
    ready: int
    """Up to COUNT_LIMIT."""
    tasks: tuple[TaskBacklog, ...] = ()


class JobGroup(msgspec.Struct, frozen=True):
    """Jobs of one queue and task that share a fate."""

    queue: str
    task: str
    count: int
    example_id: int
    by_s: float = 0.0
    """How far off, or how late, the furthest of them is."""


class TableLook(msgspec.Struct, frozen=True):
    name: str
    live_rows: int
    dead_rows: int
    size_bytes: int
    unswept_s: float
    """Since the last vacuum, or since the table was made."""
    autovacuum: bool


class Snapshot(msgspec.Struct, frozen=True):
    """Something that still needs old row versions, so that vacuum must keep them."""

    kind: SnapshotKind
    name: str
    """The pid of the session, the name of the transaction or of the slot."""
    note: str
    age_s: float | None
    active: bool = True
    behind_xacts: int = 0


class RetentionLag(msgspec.Struct, frozen=True):
    """By how long the oldest row of a kind is past its retention, among the first COUNT_LIMIT rows."""

    kind: RetentionKind
    past_s: float


class WatchLook(msgspec.Struct, frozen=True):
    """A watch period: why it began, and what happened to the ledger's clock in it."""

    cause: Cause
    since_at: float
    gap_s: float | None
    """How long no one watched before it, by the clock of then; None for the first."""
    set_back_s: float | None = None
    """The last step back of the clock within it."""
    set_back_at: float | None = None


class Waiter(msgspec.Struct, frozen=True):
    """A session that waits for somebody's lock."""

    pid: int
    application: str


class Blocker(msgspec.Struct, frozen=True):
    """A transaction that holds locks of the ledger: a session or prepared transaction of PostgreSQL, or a process that
    has a write under way in a SQLite file."""

    kind: BlockerKind
    name: str
    """The pid, or the name of the prepared transaction; empty if it cannot be known."""
    age_s: float | None
    """How long it has been open; None if we may not see it."""
    user: str = ""
    application: str = ""
    state: str = ""
    query: str = ""
    """The last statement of the session, or the command of the process."""
    tables: tuple[str, ...] = ()
    """What it has locked."""
    waiting: tuple[Waiter, ...] = ()
    """Who was seen to wait for it."""
    jobs: tuple[int, ...] = ()
    """Jobs in the hands of workers that it has locked, as far as one looks."""
    is_ours: bool = False


class AddressLook(msgspec.Struct, frozen=True):
    """A URL that names several servers."""

    setting: str
    """`url` or `listen_url`."""
    hosts: tuple[str, ...]
    """With ports, if the URL names them."""
    user: str
    database: str
    chosen: str | None
    """`target_session_attrs`, or None if neither the URL nor the environment says."""


class Diagnosis(msgspec.Struct, frozen=True):
    """What the ledger knows of its own health. What a database does not have is None, empty or zero."""

    database: str
    now_at: float
    """The ledger's clock, in seconds since the epoch."""
    clock_off_s: float | None
    """How far this host's clock is ahead of the ledger's, at least; None where both are one clock."""
    round_trip_s: float
    queues: tuple[QueueBacklog, ...] = ()
    scheduled: tuple[JobGroup, ...] = ()
    """Due further off than was asked for."""
    coming: tuple[JobGroup, ...] = ()
    """Those that are due next, however soon; each by its first."""
    overdue: tuple[JobGroup, ...] = ()
    """Due for longer than was asked for, and still not made ready."""
    quarantined: tuple[JobGroup, ...] = ()
    unswept_s: float | None = None
    """Since the sweep ticket ran out; 0 while somebody has it, None when nobody ever took it."""
    overkept: tuple[RetentionLag, ...] = ()
    """What is past its retention and still there; a little is normal, since retention looks once a minute."""
    watch: tuple[WatchLook, ...] = ()
    """The newest first."""
    several_hosts: tuple[AddressLook, ...] = ()
    pooler: bool = False
    wakeup_reachable: WakeupState = "works"
    wakeup_note: str = ""
    deaf: tuple[str, ...] = ()
    """Living workers whose bell cannot be reached from here."""
    tables: tuple[TableLook, ...] = ()
    snapshots: tuple[Snapshot, ...] = ()
    size_bytes: int = 0
    free_bytes: int = 0
    """Room inside a SQLite file that holds nothing."""
    wal_bytes: int = 0
    wal_stuck_pages: int = 0
    """Pages of the WAL that could not be copied back because somebody reads an older state."""
    readers: tuple[int, ...] = ()
    """Processes that held that older state all the while, where the system tells."""
