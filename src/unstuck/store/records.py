"""Say what goes into the ledger and what comes out of it, in plain facts.

Times are seconds since the Unix epoch (UTC) for people to read; durations are seconds by the ledger's
own clock. Payloads and results are opaque bytes: nobody in this room decodes them.
"""

from typing import Any

import msgspec

from unstuck.domain.autopsy import Autopsy
from unstuck.domain.endings import Ending, JobError, Release
from unstuck.domain.health import Disabled
from unstuck.domain.liveness import Detector, Session
from unstuck.domain.policy import OnCrash
from unstuck.domain.states import AttemptState, JobState, WorkerState

# Client → ledger ----------------------------------------------------------------------------


class NewJob(msgspec.Struct, frozen=True):
    task: str
    queue: str
    payload: bytes
    payload_type: str = "json"
    policy: bytes = b""
    """`encode_policy(...)`; the four below are copied out of it, for SQL and views."""
    on_crash: OnCrash = "fail"
    heartbeat: bool = True
    heartbeat_timeout_s: float | None = None
    timeout_s: float | None = None
    priority: int = 0
    """-1000 to 1000; higher goes first."""
    delay_s: float = 0.0
    run_at: float | None = None
    """Wins over `delay_s`."""
    unique_key: str | None = None
    enqueued_by: str | None = None


class Enqueued(msgspec.Struct, frozen=True):
    job_id: int
    fresh: bool = True
    """False: a job with this unique key was there already and is not finished; this is its id."""


# Worker ↔ ledger ----------------------------------------------------------------------------


class TaskRecord(msgspec.Struct, frozen=True):
    """A task that some worker's app knows: lets doors without the app enqueue it."""

    name: str
    queue: str
    policy: bytes = b""
    is_async: bool = False


class WorkerBirth(msgspec.Struct, frozen=True):
    id: str
    name: str
    host: str
    pid: int
    boot_id: str
    pid_namespace: str
    process_started: str
    """Start time of the process as the kernel tells it: a pid alone may be someone else's later."""
    queues: tuple[str, ...]
    tasks: tuple[TaskRecord, ...]
    concurrency: int
    version: str
    heartbeat_interval_s: float
    suspect_after_s: float
    """`claimed_stale_after`: silent for so long, the worker is suspect and loses what it only claimed."""
    running_stale_after_s: float
    """For running jobs that brought no timeout of their own."""
    metadata: dict[str, Any] = {}
    bell: str = ""
    """Where a wake-up reaches it on SQLite: set by the ledger's own `listen`."""
    trace: str = ""
    """Path of its shared memory, for neighbours on the same host."""


class Pulse(msgspec.Struct, frozen=True):
    """What a beat carries."""

    worker_id: str
    running: int
    processed: int
    metadata: dict[str, Any] | None = None
    """Only when it changed."""


class BeatAnswer(msgspec.Struct, frozen=True):
    state: WorkerState
    """As the ledger sees it *after* the beat: a SUSPECT that beats is ACTIVE again. DEAD or STOPPED: the
    beat was refused; the worker must kill what it holds and come back under a new id."""
    was_suspect: bool = False
    """It lost time: what it holds must be compared with the ledger at once."""
    request: str | None = None
    """'drain' or 'stop', when an operator asked."""
    cancel: tuple[tuple[int, int], ...] = ()
    """(job_id, token) of running jobs that someone asked to cancel."""
    disabled: bool = False
    """It, or its host, is switched off: it finishes what it runs and claims nothing."""


class Done(msgspec.Struct, frozen=True, gc=False):
    """The common case: an attempt succeeded."""

    job_id: int
    token: int
    result: bytes


class Held(msgspec.Struct, frozen=True, gc=False):
    job_id: int
    token: int


class Output(msgspec.Struct, frozen=True):
    """What a job printed, bounded by whoever sends it."""

    job_id: int
    token: int
    stdout: bytes
    stderr: bytes


class Wish(msgspec.Struct, frozen=True):
    """What a worker wants to claim."""

    queues: tuple[str, ...]
    tasks: tuple[str, ...]
    limit: int
    run_ahead: bool = False
    """Jobs with `on_crash="retry"` become RUNNING at once: the worker hands them to a runner right away."""
    start: int = 0
    """So many of the first become RUNNING at once, whatever their `on_crash`: slots wait for them."""


class Turn(msgspec.Struct, frozen=True):
    """One turn of the wheel: all of it is one commit and one round trip."""

    worker_id: str
    done: tuple[Done, ...] = ()
    endings: tuple[Ending, ...] = ()
    start: tuple[Held, ...] = ()
    release: tuple[Release, ...] = ()
    outputs: tuple[Output, ...] = ()
    wish: Wish | None = None


class Claimed(msgspec.Struct, frozen=True, gc=False):
    job_id: int
    token: int
    task: str
    queue: str
    running: bool
    """True where the run-ahead made it RUNNING in the same commit."""
    payload: bytes
    payload_type: str
    policy: bytes
    failures: int
    crashes: int
    attempt: int
    """1 for the first try that a worker claimed, and so on: for people, never a fence."""
    suspicions: int = 0
    """Deaths that it shared with others, so far."""
    alone: bool = False
    """It may have killed a process that it shared, and must have one of its own."""


class TurnAnswer(msgspec.Struct, frozen=True):
    alive: bool
    """False: the worker is dead or stopped in the ledger; nothing of this turn was written."""
    claimed: tuple[Claimed, ...] = ()
    superseded: frozenset[tuple[int, int]] = frozenset()
    """(job_id, token) of every done, ending, start or release that matched no row: no longer ours."""
    next_due_in_s: float | None = None
    """When the next scheduled job of these queues becomes due, where the claim found too little."""


class HeldJob(msgspec.Struct, frozen=True):
    """A job in somebody's hands, with what the rules need to judge it."""

    job_id: int
    token: int
    worker_id: str
    state: JobState
    task: str
    queue: str
    policy: bytes
    failures: int
    crashes: int
    cancel_requested: bool
    timeout_s: float | None
    heartbeat_timeout_s: float | None
    """Its own, else the worker's `running_stale_after_s`; None where `heartbeat=False`."""
    held_s: float
    """Since it was claimed."""
    running_s: float
    """Since it was started; 0 for a claimed one."""
    silent_s: float
    """Since its worker's last beat, by the same rule as `WorkerWatch.silent_s`."""
    suspicions: int = 0


class Progress(msgspec.Struct, frozen=True):
    """How far a running job says it is, and since when its interpreter is silent."""

    job_id: int
    token: int
    at: float
    """Its last sign, in seconds since 1970."""
    done: float | None = None
    total: float | None = None
    message: str = ""
    busy_since: float | None = None
    """Since when no Python code ran in its process: it is busy in C code, or stuck there."""


# Reaper ↔ ledger ----------------------------------------------------------------------------


class WorkerWatch(msgspec.Struct, frozen=True):
    """A worker as the watchman sees it."""

    id: str
    name: str
    host: str
    pid: int
    boot_id: str
    pid_namespace: str
    process_started: str
    trace: str
    state: WorkerState
    silent_s: float
    """Since max(last beat, last outage that silenced everyone, start of the database server)."""
    suspect_after_s: float
    waits_for_s: float | None
    """The longest heartbeat timeout among its RUNNING jobs (infinite where one has `heartbeat=False`)."""
    held: int
    session: Session
    suspect_s: float
    """For how long it has been SUSPECT; 0 where it is not."""
    shortest_s: float | None = None
    """The shortest heartbeat timeout among its RUNNING jobs (those with `heartbeat=False` left out)."""


class GuardSilent(msgspec.Struct, frozen=True):
    """Repeat the evidence in the write: only while the worker has been silent for at least so long."""

    silent_s: float


class GuardDead(msgspec.Struct, frozen=True):
    """Only while the worker stands as dead (or stopped) in the ledger."""


class GuardSuspect(msgspec.Struct, frozen=True):
    """Only while the worker is still SUSPECT: it did not beat since."""


class GuardNone(msgspec.Struct, frozen=True):
    """An operator's word, or the kernel's: the token alone is the fence."""


Guard = GuardSilent | GuardDead | GuardSuspect | GuardNone


class WorkerVerdict(msgspec.Struct, frozen=True):
    state: WorkerState
    detector: Detector
    evidence: str
    silent_s: float
    by: str
    """Who decided: a worker id, 'reaper', 'supervisor' or an operator."""
    autopsy: Autopsy | None = None
    """What is known of how its process ended."""


class Promoted(msgspec.Struct, frozen=True):
    count: int
    queues: frozenset[str]
    next_due_in_s: float | None


class Swept(msgspec.Struct, frozen=True):
    """What retention removed."""

    jobs: int
    events: int
    workers: int


# Ledger → people ----------------------------------------------------------------------------


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
    limit: int = 100
