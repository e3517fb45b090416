"""What workers hand to the ledger and get from it: heartbeats, turns, exchanges. Records and protocol."""

from collections.abc import Collection, Sequence
from typing import Any, Protocol

import msgspec

from unstuck.domain.autopsy import Autopsy
from unstuck.domain.endings import Ending, Release
from unstuck.domain.liveness import Detector, read_detector
from unstuck.domain.recovery_rules import RecoveryRules
from unstuck.domain.states import JobState, Transport, WorkerState
from unstuck.domain.worker_health import Disabled, Standing
from unstuck.ledger.contract.jobs import Enqueued, NewJob, Progress, Request, TaskRecord


class NewWorker(msgspec.Struct, frozen=True):
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
    wakeup_address: str = ""
    """Where a wake-up reaches it on SQLite: set by the ledger's own `listen`."""
    status_page: str = ""
    """Path of its shared memory, for neighbours on the same host."""
    transport: Transport = Transport.PYTHON
    owner: str | None = None
    """The token that it came with: nobody else may speak for it."""
    rules: RecoveryRules | None = None
    """By which recovery settings it is judged; None: by those of whoever judges it."""


class Heartbeat(msgspec.Struct, frozen=True):
    """What a beat carries."""

    worker_id: str
    running: int
    processed: int
    metadata: dict[str, Any] | None = None
    """Only when it changed."""


class RemoteHeartbeat(msgspec.Struct, frozen=True):
    """What the beat of a worker carries that came through another door than Python's own."""

    worker_id: str
    running: int | None = None
    """None: as it was."""
    settled: int = 0
    """So many more than with its last beat."""
    metadata: dict[str, Any] | None = None
    """Only when it changed."""


class HeartbeatAnswer(msgspec.Struct, frozen=True):
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


class Success(msgspec.Struct, frozen=True, gc=False):
    """The common case: an attempt succeeded."""

    job_id: int
    token: int
    result: bytes


class AttemptRef(msgspec.Struct, frozen=True, gc=False):
    job_id: int
    token: int


class Output(msgspec.Struct, frozen=True):
    """What a job printed, bounded by whoever sends it."""

    job_id: int
    token: int
    stdout: bytes
    stderr: bytes


class JournalEntry(msgspec.Struct, frozen=True):
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
"""Maximum size of the jobs that one turn claims: their payloads, journals and waiting signals. A single job may be
larger. In SQL: `c_claim_bytes`."""


class ClaimRequest(msgspec.Struct, frozen=True):
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
    done: tuple[Success, ...] = ()
    endings: tuple[Ending, ...] = ()
    start: tuple[AttemptRef, ...] = ()
    release: tuple[Release, ...] = ()
    outputs: tuple[Output, ...] = ()
    claim_request: ClaimRequest | None = None
    entries: tuple[JournalEntry, ...] = ()
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
    suspected_crashes: int = 0
    """Deaths that it shared with others, so far."""
    run_alone: bool = False
    """It may have killed a process that it shared, and must have one of its own."""
    waited_s: float = 0.0
    """From when it was due until this claim."""
    journal: bytes = b""
    """What earlier attempts wrote down, and the signals that it was sent; packed as `domain.journal` does."""
    inputs: bytes = b""
    """How those ended that it depends on in its workflow; packed as `domain.node_inputs` does."""


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


class HeldRecord(msgspec.Struct, frozen=True):
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
    suspected_crashes: int = 0
    deferred: bool = False
    """Its worker is done with it, and a lock keeps the outcome from the ledger."""


class DeferredOutcome(msgspec.Struct, frozen=True):
    """An outcome that cannot be written yet, because another session holds a lock that it needs."""

    job_id: int
    token: int
    reason: str
    is_return: bool = False
    """Its code never began: it is on its way back to its queue."""


class ReplyAddress(msgspec.Struct, frozen=True):
    """Where the answer to a job goes."""

    client: bytes
    """The identity that the client chose: 16 to 255 bytes."""
    service: str
    request_id: str
    """The same for all calls that came in one request."""
    place: int = 0
    """Of this call in its request, from 0."""
    places: int = 1
    """How many calls came in that request."""
    correlation: bytes | None = None
    own_id: str | None = None
    """What the client calls this job."""
    notify: bool = False
    """The client wants to hear of deaths."""
    job_id: int = 0
    """Given by the ledger."""
    answered_at: float | None = None
    """Given by the ledger."""


class OnceJob(msgspec.Struct, frozen=True):
    """A job that must not be stored again where its request was seen before, also when the job has ended since."""

    request: Request
    job: NewJob
    reply_address: ReplyAddress | None = None


class Exchange(msgspec.Struct, frozen=True):
    """What happened at a broker between two polls of its sockets, written in one commit.

    Order: answered, jobs, once, heartbeats, turns. So a new job can be claimed at once, and an answered reply address
    is never the one that replaces it. To keep the order of locks, PostgreSQL may commit the heartbeats first, and
    admits jobs that wait for a concurrency key last."""

    jobs: tuple[NewJob, ...] = ()
    reply_addresses: tuple[ReplyAddress | None, ...] = ()
    """Those of `jobs`, at the same places; empty where none of them has one."""
    once: tuple[OnceJob, ...] = ()
    turns: tuple[Turn, ...] = ()
    heartbeats: tuple[RemoteHeartbeat, ...] = ()
    answered: tuple[int, ...] = ()
    """Jobs whose letters need no answer any more."""


class ExchangeAnswer(msgspec.Struct, frozen=True):
    enqueued: tuple[Enqueued, ...] = ()
    once: tuple[Enqueued | None, ...] = ()
    """None: the key came with something else before, and nothing was stored."""
    turns: tuple[TurnAnswer, ...] | None = ()
    """None: their answer was lost, and they were done or not, all of them. Compare what is held, and go on. All the
    rest is known to have happened."""
    heartbeats: tuple[HeartbeatAnswer, ...] = ()


class Listener(Protocol):
    """A wake-up that may be lost: losing it costs one poll interval, nothing else."""

    def wait(self, timeout_s: float) -> frozenset[str]:
        """Wait for rings and give their words, coalesced; an empty set when the time is up."""
        ...

    def interrupt(self) -> None:
        """Make `wait` return now; safe from any thread and from a signal handler."""
        ...

    def close(self) -> None: ...


class WorkerVerdict(msgspec.Struct, frozen=True):
    state: WorkerState
    detector: Detector
    evidence: str
    silent_s: float
    by: str
    """Who decided: a worker id, 'reaper', 'supervisor' or an operator."""
    autopsy: Autopsy | None = None
    """What is known of how its process ended."""
    session: str | None = None
    """The database session that was missing, of a suspicion for that reason."""


def read_verdict(stored: dict[str, Any] | None) -> WorkerVerdict | None:
    """Understand a stored verdict. What a newer version wrote must not stop us: what we do not know is left out."""
    if stored is None:
        return None
    try:
        return msgspec.convert(stored, WorkerVerdict)
    except msgspec.ValidationError:
        pass
    known = {name: value for name, value in stored.items() if name != "autopsy"}
    if read_detector(stored.get("detector")) is None:
        # Of all that we know this one proves the least.
        known["detector"] = Detector.OPERATOR.value
        known["evidence"] = (
            f"{stored.get('evidence', '')} (seen by {stored.get('detector')!r}, unknown to this version)"
        )
    try:
        return msgspec.convert(known, WorkerVerdict)
    except msgspec.ValidationError:
        return None


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
    transport: Transport = Transport.PYTHON
    owner: str | None = None
    """The token that it came with, if any."""
    running_stale_after_s: float | None = None
    """Silent for this long, it loses running jobs that brought no timeout of their own."""
    rules: RecoveryRules | None = None
    """The recovery settings that it stored when it registered."""
    busy: int = 0
    """How many jobs it runs by the ledger, at this moment. `running` is what it said with its last heartbeat."""


class PipelinedHeartbeats(Protocol):
    """Beats that were sent and are not answered yet. Whatever goes wrong (any exception): drop it, and beat again with
    `record_heartbeats`, which says what is wrong."""

    @property
    def fd(self) -> int:
        """What to wait for: it can be read when there is something to take in."""
        ...

    @property
    def unsent(self) -> bool:
        """Some of it could not be sent yet: `push` when `fd` can be written."""
        ...

    @property
    def limit_s(self) -> float:
        """How long to wait for the answer before it is given up: a hung server says nothing at all."""
        ...

    def push(self) -> None: ...

    def land(self) -> list[HeartbeatAnswer] | None:
        """Take in what has come; None while that is not all of it."""
        ...

    def drop(self) -> None:
        """Give it up; nobody knows whether they were written."""
        ...


class Fleet(msgspec.Struct, frozen=True):
    """All workers in a few numbers: what a scrape needs, however many there are."""

    workers: dict[str, int]
    """How many there are of each state; the dead and stopped until retention removes them."""
    late: int = 0
    """Living workers that missed two beats in a row."""
    silent_s: float = 0.0
    """The longest silence among the living."""
    unswept_s: float | None = None
    """Since the sweep ticket ran out; 0 while somebody has it, None when nobody ever took it."""


class Workers(Protocol):
    """Register workers, hear their heartbeats, hand them jobs, and read and control them."""

    def register(self, new_worker: NewWorker) -> bool:
        """Write the worker down as ACTIVE with its first beat, and the tasks that it knows. True: its host is
        disabled, and it must not claim.

        Raise NameTaken if it is a Python worker and a living worker of another transport has its name, or the other way
        round: people could not tell the two apart."""
        ...

    def listen(self, worker_id: str) -> Listener:
        """Open the wake-ups of a worker; call it after `register`."""
        ...

    def listen_all(self) -> Listener:
        """Open a listener that hears every wake-up, for a process that speaks for many workers."""
        ...

    def beat(self, heartbeat: Heartbeat) -> HeartbeatAnswer:
        """Push the worker's deadline forward: one narrow UPDATE, never an insert. A missing row means dead."""
        ...

    def beat_async(self, heartbeats: Sequence[RemoteHeartbeat]) -> PipelinedHeartbeats | None:
        """Begin to do the same without waiting, for an event loop; None if `record_heartbeats` must be called."""
        ...

    def record_heartbeats(self, heartbeats: Sequence[RemoteHeartbeat]) -> list[HeartbeatAnswer]:
        """Like `beat`, for many in one commit; the answers are in the same order. That one of them is late says nothing
        of the ledger, so nobody is forgiven for it. No disk is waited for: a beat that a crash forgets is forgiven by
        the restart."""
        ...

    def turn(self, turn: Turn) -> TurnAnswer:
        """Do one turn: settle, start, release and claim in one commit and one round trip."""
        ...

    def exchange(self, exchange: Exchange) -> ExchangeAnswer:
        """Do all of it in one commit, or nothing. A turn of a dead worker is answered as such, and the others are done
        all the same. RefusedValue for one value that cannot be stored: split it. Where it only wishes, and there is
        nothing to be had, nobody who writes is made to wait."""
        ...

    def reply_addresses(self, client: bytes, after_job_id: int = 0, limit: int = 1000) -> list[ReplyAddress]:
        """Return the unanswered reply addresses of a client, in the order of their jobs. They go when their jobs go."""
        ...

    def reply_address(self, job_id: int) -> ReplyAddress | None:
        """Return the reply address of a job, answered or not. A job enqueued again under its unique key gets the new
        one."""
        ...

    def blocked_outcomes(self, job_ids: Collection[int]) -> dict[int, str]:
        """Return those of these jobs that cannot be ended now, because another session holds their rows: which one."""
        ...

    def blocked(self, worker_ids: Collection[str]) -> set[str]:
        """Return those of these workers whose turns cannot be written now, because another session holds their rows."""
        ...

    def held(self, worker_id: str) -> list[HeldRecord]:
        """Return all that this worker holds by the ledger."""
        ...

    def note_progress(self, worker_id: str, notes: Sequence[Progress]) -> None:
        """Store the progress of running jobs; those that this worker does not hold any more are passed over."""
        ...

    def note_deferred(
        self, worker_id: str, outcomes: Sequence[DeferredOutcome], good_for_s: float | None = None
    ) -> None:
        """Write down that the worker is done with these attempts, though a lock keeps their outcomes from the ledger:
        they do not count as late while it lives. `good_for_s`: for so long only, unless it is repeated."""
        ...

    def request(self, worker_id: str, what: str, by: str) -> bool:
        """Ask a worker to 'drain' or 'stop'. Return False if it is not living."""
        ...

    def drain(self, worker_id: str) -> None:
        """Write ACTIVE → DRAINING."""
        ...

    def stop(self, worker_id: str) -> None:
        """Write the end of a worker that shut down in order: STOPPED. What it still holds is left to the reaper."""
        ...

    def remote(self, worker_id: str) -> WorkerRecord | None:
        """Return a remote worker, whatever its state."""
        ...

    def find_remote(self, name: str) -> WorkerRecord | None:
        """Return the living remote worker of this name, else the last that had it. `register` refuses, by writing
        nothing, a second living one of the same name."""
        ...

    def find_python(self, name: str) -> str | None:
        """Return the id of a living worker of Python's own with this name, if there is one."""
        ...

    def standings(self) -> list[Standing]:
        """Return the living workers as the judgement of health sees them."""
        ...

    def disable(self, worker_id: str, reason: str, by: str, *, auto: bool = False) -> bool:
        """Switch a living worker off, with an event; it hears of it in its next beat. False: it is not living, or off
        already. With `auto` it is also left alone where it is the last that serves one of its queues, which is looked
        at under a lock: two who switch off two at once cannot both be right."""
        ...

    def enable(self, worker_id: str, by: str, reason: str = "") -> bool:
        """Enable a worker, and forget the health that it reported. Return False if it was not disabled itself."""
        ...

    def disable_host(self, host: str, reason: str, by: str) -> bool:
        """Disable every worker of a host, even those that start later; its name need not be known. False: it was
        disabled already."""
        ...

    def enable_host(self, host: str, by: str, reason: str = "") -> bool:
        """Enable a host, and forget the health that its workers reported. Return False if it was not disabled."""
        ...

    def fleet(self) -> Fleet:
        """Return all workers in a few numbers; as cheap with ten thousand."""
        ...

    def list(self, living_only: bool = False) -> list[WorkerRecord]: ...
