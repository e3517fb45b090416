"""What clients and workers hand to the ledger, and what they get from it."""

from typing import Any, Literal

import msgspec

from unstuck.domain.endings import Ending, Release
from unstuck.domain.policy import OnCrash
from unstuck.domain.rules import RecoveryRules
from unstuck.domain.states import Door, JobState, WorkerState

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
    more: "Ties | None" = None


class Ties(msgspec.Struct, frozen=True, omit_defaults=True):
    """What few jobs have: whom else their ends concern, and how long they are good for."""

    line: str | None = None
    """Its `concurrency_key`: so many of one line run at once as its `line_limit` says."""
    line_limit: int | None = None
    workflow_id: int | None = None
    place: int | None = None
    needs: bool | None = None
    """Of a node: it is given results of others with its claim."""
    hooks: dict[str, Any] | None = None
    """Work that follows its ends, by kind of end."""
    expires_in_s: float | None = None
    """Not begun within that time it is cancelled as expired."""
    keep_s: float | None = None
    """How long it is kept after its end; None: as long as the ledger keeps all."""
    unique: Literal["pending"] | None = None
    """What its unique key is good for: until it is claimed; None: until it ends."""
    unique_for_s: float | None = None
    """… or for so long from its enqueue, however it ends."""
    on_duplicate: Literal["replace", "refuse"] | None = None
    """What becomes of it where another job has its key; None: that job is given back."""
    later: bool | None = None
    """Set by a ledger: it stands in line only after its transaction."""


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
    door: Door = Door.PYTHON
    owner: str | None = None
    """The token that it came with: nobody else may speak for it."""
    rules: RecoveryRules | None = None
    """By which recovery settings it is judged; None: by those of whoever judges it."""


class Pulse(msgspec.Struct, frozen=True):
    """What a beat carries."""

    worker_id: str
    running: int
    processed: int
    metadata: dict[str, Any] | None = None
    """Only when it changed."""


class ForeignPulse(msgspec.Struct, frozen=True):
    """What the beat of a worker carries that came through another door than Python's own."""

    worker_id: str
    running: int | None = None
    """None: as it was."""
    settled: int = 0
    """So many more than with its last beat."""
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


class Entry(msgspec.Struct, frozen=True):
    """Something that a job wrote down on its way, so that the next attempt need not do it again."""

    job_id: int
    token: int
    seq: int
    """Its place in the journal of its job, from 1: what is there already is not written again."""
    kind: str
    name: str
    value: bytes
    signal: int | None = None
    """The number of the signal that is taken by it."""


class FollowUp(msgspec.Struct, frozen=True):
    """A job that an attempt asked for, to be enqueued in the commit that writes its end, and only then."""

    job_id: int
    token: int
    job: NewJob


CLAIM_BYTES = 8 * 1024 * 1024
"""Payloads of all that one turn claims; a single job may be larger. In SQL: `c_claim_bytes`."""


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
    entries: tuple[Entry, ...] = ()
    follow: tuple[FollowUp, ...] = ()


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
    waited_s: float = 0.0
    """From when it was due until this claim."""
    journal: bytes = b""
    """What earlier attempts wrote down, and the signals that it was sent; packed as `domain.journal` does."""
    inputs: bytes = b""
    """How those ended that it depends on in its workflow; packed as `domain.inputs` does."""


class TurnAnswer(msgspec.Struct, frozen=True):
    alive: bool
    """False: the worker is dead or stopped in the ledger; nothing of this turn was written."""
    claimed: tuple[Claimed, ...] = ()
    superseded: frozenset[tuple[int, int]] = frozenset()
    """(job_id, token) of every done, ending, start or release that matched no row: no longer ours."""
    next_due_in_s: float | None = None
    """When the next scheduled job of these queues becomes due, where the claim found too little."""
    more: bool = False
    """There are more that were wished for; they did not fit into `CLAIM_BYTES`."""


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
    deferred: bool = False
    """Its worker is done with it, and a lock keeps the outcome from the ledger."""


class DeferredOutcome(msgspec.Struct, frozen=True):
    """An outcome that cannot be written yet, because another session holds a lock that it needs."""

    job_id: int
    token: int
    reason: str
    is_return: bool = False
    """Its code never began: it is on its way back to its queue."""


class DeferredRecord(msgspec.Struct, frozen=True):
    """What the ledger knows of an outcome that it could not be given yet."""

    worker_id: str
    is_return: bool
    reason: str
    since: float


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
