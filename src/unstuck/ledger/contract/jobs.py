"""Jobs: the records for enqueueing and reading them, and their protocol."""

from collections.abc import Collection, Sequence
from typing import Any, Literal, Protocol

import msgspec

from unstuck.domain.autopsy import Autopsy
from unstuck.domain.endings import JobError
from unstuck.domain.policy import OnCrash
from unstuck.domain.states import AttemptState, JobState


class JournalRecord(msgspec.Struct, frozen=True):
    seq: int
    """Its place, from 1; 0 is the checkpoint."""
    kind: str
    name: str
    value: bytes
    """JSON."""
    at: float
    token: int
    """The attempt that wrote it."""


class SignalRecord(msgspec.Struct, frozen=True):
    number: int
    name: str
    value: bytes
    """JSON."""
    at: float
    sent_by: str
    taken_seq: int | None
    """The entry by which the job took it; None while it is kept."""


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
    suspected_crashes: int = 0
    run_alone: bool = False
    awaits_signal: str | None = None
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
    last_attempt_state: AttemptState | None
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


class OutputRecord(msgspec.Struct, frozen=True):
    token: int
    stdout: bytes
    stderr: bytes


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
    more: "JobExtras | None" = None


class JobExtras(msgspec.Struct, frozen=True, omit_defaults=True):
    """What few jobs have: whom else their ends concern, and how long they are good for."""

    concurrency_key: str | None = None
    """Jobs with the same key share its `concurrency_limit`."""
    concurrency_limit: int | None = None
    """Maximum number of jobs with this key that are held at once."""
    workflow_id: int | None = None
    place: int | None = None
    needs_inputs: bool | None = None
    """Of a node: it is given results of others with its claim."""
    hooks: dict[str, Any] | None = None
    """Work that follows its ends, by kind of end."""
    expires_in_s: float | None = None
    """Not begun within that time it is cancelled as expired."""
    retain_s: float | None = None
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


class Request(msgspec.Struct, frozen=True):
    key: bytes
    """A hash of who asks and of their key."""
    fingerprint: bytes
    """A hash of what is asked for."""
    keep_s: float
    """How long it counts as the same request."""


class OnceAnswer(msgspec.Struct, frozen=True):
    stored: tuple[Enqueued, ...]
    """What the first request with this key stored, and what it was told; empty where that asked for something else."""
    repeated: bool
    """This was not the first."""


class JobLinks(msgspec.Struct, frozen=True):
    """What few jobs have beside their work."""

    concurrency_key: str | None = None
    concurrency_limit: int | None = None
    blocked: bool = False
    expires_at: float | None = None
    retain_s: float | None = None
    unique_for: str | None = None
    workflow_id: int | None = None
    place: int | None = None
    awaits_signal: str | None = None


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


class JobPosition(msgspec.Struct, frozen=True):
    """Where a job stands, for somebody who follows it: a narrow look that costs next to nothing."""

    job_id: int
    state: JobState
    attempt: int
    token: int | None
    worker_id: str | None


class Jobs(Protocol):
    """Enqueue jobs, read them, and act on them."""

    def enqueue(self, jobs: Sequence[NewJob], patience_s: float = 10.0) -> list[Enqueued]:
        """Store jobs durably, all or none, in their order. Repeats itself safely where the commit was uncertain.

        Raise LedgerBusy if an open transaction holds a unique key of theirs for longer than `patience_s`."""
        ...

    def enqueue_once(self, request: Request, jobs: Sequence[NewJob]) -> OnceAnswer:
        """Store jobs, all or none, unless a request with this key did so before, also where those jobs have ended."""
        ...

    def enqueue_on(self, connection: Any, jobs: Sequence[NewJob]) -> list[Enqueued]:
        """Store jobs inside the caller's own transaction; nothing is committed here."""
        ...

    def outcomes(self, job_ids: Collection[int]) -> list[Outcome]:
        """Return the outcomes of the jobs that have finished, whatever their state. The others are left out."""
        ...

    def missing(self, job_ids: Collection[int]) -> set[int]:
        """Return the ids that do not exist: they never did, or were pruned."""
        ...

    def get(self, job_id: int) -> JobRecord | None: ...

    def attempts(self, job_id: int) -> list[AttemptRecord]:
        """Oldest first, the current one included, each with its autopsy where there is one."""
        ...

    def progress(self, job_ids: Collection[int]) -> dict[int, Progress]:
        """Return the progress that these jobs reported. Jobs without a report are left out."""
        ...

    def deferred_outcome(self, job_id: int) -> DeferredRecord | None:
        """Return since when the outcome of the present attempt of a job waits for a lock; None if it does not."""
        ...

    def outputs(self, job_id: int) -> list[OutputRecord]: ...

    def links(self, job_id: int) -> JobLinks | None: ...

    def positions(self, job_ids: Collection[int]) -> list[JobPosition]:
        """Return the state of these jobs in brief. Jobs that do not exist are left out."""
        ...

    def fates(self, attempts: Sequence[tuple[int, int]]) -> list[Fate]:
        """Return what became of attempts, each named by job and token, in the same order: one read for all of them."""
        ...

    def count(self) -> dict[str, int]:
        """Count jobs by state."""
        ...

    def cancel(self, job_ids: Collection[int], by: str) -> dict[int, str]:
        """Cancel: 'cancelled' (it waited or was only claimed), 'requested' (it runs; its worker is told),
        'finished' (too late), 'missing'."""
        ...

    def cancel_untaken(self, job_ids: Collection[int], waited_s: float, by: str) -> list[int]:
        """Cancel those that have been due for so long and wait for a worker; return which. What a worker has, what
        sleeps or waits for a signal, and what is not due yet is left alone."""
        ...

    def retry(self, job_ids: Collection[int], by: str) -> dict[int, str]:
        """Queue finished jobs again with fresh counters: 'queued', 'live' (not finished), 'succeeded', 'missing',
        'duplicate' (its unique key is in use by another live job)."""
        ...

    def signal(self, job_id: int, name: str, value: bytes, by: str) -> str:
        """Keep a signal for a job: 'woken' (it waited for this one), 'kept' (until it does), 'finished' (too late),
        'full' (too many wait for it already), 'workflow' (it stands for one, and takes none), 'missing'. Several of one
        name are taken in their order, each once."""
        ...

    def journal(self, job_id: int, within_bytes: int | None = None) -> list[JournalRecord]:
        """Return what the job wrote down, in order; the checkpoint, if there is one, comes first.

        If the values have more than `within_bytes` together, the largest are left out: no JSON is empty as they are."""
        ...

    def signals(self, job_id: int, within_bytes: int | None = None) -> list[SignalRecord]:
        """Return all signals that it was sent, oldest first, taken or not; values are left out as in `journal`."""
        ...

    def list(self, where: JobFilter) -> list[JobRecord]:
        """Newest first; payload and result are left empty."""
        ...
