"""The ledger's contract: few verbs, shaped for batches, the same on every database.

Every write that concerns an attempt carries its token and matches the state. A write that matches no row
is *superseded*, which is an answer and not an error. Errors of a driver are translated once, into
`LedgerUnavailable` (try again), `UncertainCommit` (try again, the write may have happened),
`RefusedValue` (split the batch), `SchemaMismatch` and `LedgerError`.

A ledger may be used by several threads at once. It opens its connections on first use, and refuses to
use them after a fork.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Protocol

from unstuck.domain.endings import Ending, Release
from unstuck.domain.health import Standing
from unstuck.store.diagnosis import Diagnosis
from unstuck.store.records import (
    AlertEvent,
    AlertTarget,
    ApiTokenRecord,
    AttemptRecord,
    AuditRecord,
    BeatAnswer,
    ConditionChange,
    ConditionLook,
    ConditionRecord,
    Count,
    Enqueued,
    EventRecord,
    Exchange,
    ExchangeAnswer,
    Fleet,
    ForeignPulse,
    Glance,
    Guard,
    HeldJob,
    HostRecord,
    JobFilter,
    JobRecord,
    Letter,
    MinuteCount,
    NewApiToken,
    NewJob,
    OnceAnswer,
    Outcome,
    OutputRecord,
    Progress,
    Promoted,
    Pulse,
    QueueRecord,
    Request,
    Swept,
    TaskRecord,
    Turn,
    TurnAnswer,
    WorkerBirth,
    WorkerRecord,
    WorkerVerdict,
    WorkerWatch,
)


class Bell(Protocol):
    """A wake-up that may be lost: losing it costs one poll interval, nothing else."""

    def wait(self, timeout_s: float) -> frozenset[str]:
        """Wait for rings and give their words, coalesced; an empty set when the time is up."""
        ...

    def interrupt(self) -> None:
        """Make `wait` return now; safe from any thread and from a signal handler."""
        ...

    def close(self) -> None: ...


class Ledger(Protocol):
    one_host: bool
    """Everybody who uses it shares one machine, and one boot of it: true of a file, not of a server."""

    # Life of the ledger itself --------------------------------------------------------------

    def migrate(self) -> list[str]:
        """Bring the tables up to date and give the names of what was applied.

        Under a lock, safe to run twice at once, each file in a transaction of its own. SchemaMismatch when
        the tables are newer than this code knows."""
        ...

    def check_schema(self) -> None:
        """Raise SchemaMismatch, naming the cure, unless the tables fit this code."""
        ...

    def void_tokens(self) -> int:
        """After a restore from a backup: every living worker is dead, every token is void, what was held
        goes back to the queue (claimed) or waits for the next sweep (running). Gives the number of workers."""
        ...

    def describe(self) -> dict[str, Any]:
        """Say what this ledger is, for people: database, version, schema, pooler, bell."""
        ...

    def diagnose(self, *, far_s: float, late_s: float) -> Diagnosis:
        """Look at the ledger's own health, in bounded looks; really rings the bell where there is one.

        `scheduled` are jobs due in more than `far_s`, `overdue` those that have been due for `late_s`."""
        ...

    def close(self) -> None: ...

    # Clients --------------------------------------------------------------------------------

    def enqueue(self, jobs: Sequence[NewJob]) -> list[Enqueued]:
        """Store jobs durably, all or none, in their order. Repeats itself safely where the commit was uncertain."""
        ...

    def enqueue_once(self, request: Request, jobs: Sequence[NewJob]) -> OnceAnswer:
        """Store jobs, all or none, unless a request with this key did so before, also where those jobs have ended."""
        ...

    def enqueue_on(self, connection: Any, jobs: Sequence[NewJob]) -> list[Enqueued]:
        """Store jobs inside the caller's own transaction; nothing is committed here."""
        ...

    def ring(self, words: Iterable[str]) -> None:
        """Wake who listens: 'queue:NAME', 'worker:ID' (control), 'workers' (somebody was born or died).

        Best effort, outside any transaction, never raises for a bell that cannot be rung."""
        ...

    def outcomes(self, job_ids: Collection[int]) -> list[Outcome]:
        """Give those that are finished, of any state; the others are left out."""
        ...

    def missing(self, job_ids: Collection[int]) -> set[int]:
        """Give those that do not exist (never did, or were pruned)."""
        ...

    # Workers --------------------------------------------------------------------------------

    def register(self, birth: WorkerBirth) -> bool:
        """Write the worker down as ACTIVE with its first beat, and the tasks that it knows. True: its host is
        disabled, and it must not claim."""
        ...

    def listen(self, worker_id: str) -> Bell:
        """Open the bell of a worker; call it after `register`."""
        ...

    def beat(self, pulse: Pulse) -> BeatAnswer:
        """Push the worker's deadline forward: one narrow UPDATE, never an insert. A missing row means dead."""
        ...

    def turn(self, turn: Turn) -> TurnAnswer:
        """Do one turn of the wheel in one commit and one round trip."""
        ...

    def held(self, worker_id: str) -> list[HeldJob]:
        """Give all that the ledger believes this worker holds."""
        ...

    def note_progress(self, worker_id: str, notes: Sequence[Progress]) -> None:
        """Write how far running jobs are; what is not this worker's any more is passed over."""
        ...

    def drain(self, worker_id: str) -> None:
        """Write ACTIVE → DRAINING."""
        ...

    def retire(self, worker_id: str) -> None:
        """Write the end of a worker that shut down in order: STOPPED. What it still holds is left to the reaper."""
        ...

    # Foreign workers: those through another door than Python's own -----------------------------

    def foreign_worker(self, worker_id: str) -> WorkerRecord | None:
        """Give one of them, whatever its state."""
        ...

    def foreign_worker_named(self, name: str) -> WorkerRecord | None:
        """Give the living one of this name, else the last that had it. `register` refuses, by writing nothing, a second
        living one of the same name."""
        ...

    def beat_foreign(self, pulses: Sequence[ForeignPulse]) -> list[BeatAnswer]:
        """Like `beat`, for many in one commit; the answers are in the same order. That one of them is late says nothing
        of the ledger, so nobody is forgiven for it. No disk is waited for: a beat that a crash forgets is forgiven by
        the restart."""
        ...

    def overhear(self) -> Bell:
        """Open a bell that hears every word, for a process that speaks for many workers."""
        ...

    # Reaper ---------------------------------------------------------------------------------

    def take_ticket(self, name: str, ttl_s: float) -> bool:
        """Win the right to do one round; it expires by itself, so nobody can hold it while frozen."""
        ...

    def watch(self, host: str | None = None) -> list[WorkerWatch]:
        """Give every living worker, and every dead or stopped one that still holds jobs."""
        ...

    def to_judge(self) -> tuple[list[WorkerWatch], int]:
        """Like `watch`, without those foreign workers of whom nothing is to be judged: they live, and were heard within
        every timeout that concerns them. Of these only the number is given, so that a round looks at ten thousand in
        the time of a few."""
        ...

    def ring_of(self, worker_id: str, host: str, size: int) -> list[WorkerWatch]:
        """Give the `size` living workers of this host that follow this one in the order of ids, going round."""
        ...

    def condemn(self, worker_id: str, verdict: WorkerVerdict, guard: Guard) -> bool:
        """Write SUSPECT or DEAD with its event, if the guard still holds; locks the identity row, so that no
        turn of a dead worker commits after it. False: somebody was faster, or it beat."""
        ...

    def amend(self, worker_id: str, verdict: WorkerVerdict) -> bool:
        """Write down more of how a worker ended that is dead already; False where it is not."""
        ...

    def held_by(self, worker_id: str, limit: int) -> list[HeldJob]:
        """Like `held`, bounded, oldest first, for the sweep."""
        ...

    def settle(
        self, worker_id: str, endings: Sequence[Ending], releases: Sequence[Release], guard: Guard
    ) -> set[tuple[int, int]]:
        """End attempts of someone else, if the guard still holds; give the (job_id, token) that were written."""
        ...

    def overdue(self, limit: int) -> list[HeldJob]:
        """Give RUNNING jobs that passed their hard deadline by a grace while their worker is not settling them:
        those of dead or suspect workers, and of any worker 30 s past the deadline."""
        ...

    def promote_due(self, limit: int) -> Promoted:
        """Make ready what was scheduled and is due."""
        ...

    def standings(self, dead_for_s: float) -> list[Standing]:
        """Give what health is judged by: the living, and those that died or stopped at most so long ago and since
        their host was last enabled."""
        ...

    def sweep_old(self, jobs_s: float, events_s: float, workers_s: float, limit: int) -> Swept:
        """Remove finished jobs, events and dead or stopped workers (that hold nothing) older than given."""
        ...

    # Those who listen -------------------------------------------------------------------------

    def note_event(
        self,
        kind: str,
        message: str,
        *,
        job_id: int | None = None,
        worker_id: str | None = None,
        about: str | None = None,
    ) -> int:
        """Write an event that belongs to no other verb; give its id. `about` names what is neither job nor worker."""
        ...

    def glance(self, job_ids: Collection[int]) -> list[Glance]:
        """Say where these jobs stand; those that do not exist are left out."""
        ...

    def unserved(self, wanted: Collection[tuple[str, str]]) -> set[tuple[str, str]]:
        """Give those pairs of queue and task that no worker would take now: none lives that serves the one and knows
        the other, or all that do are leaving or switched off."""
        ...

    # Counting -------------------------------------------------------------------------------

    def count(self, totals: Sequence[Count], lately: Sequence[Count] = ()) -> None:
        """Add to what was counted since ever, and to what was counted in this minute, in one commit.

        No name and labels may be twice among `totals`, nor among `lately`. After an UncertainCommit it may have
        happened: who cannot bear to count twice must not repeat it."""
        ...

    def counters(self) -> list[Count]:
        """Give what was counted since ever."""
        ...

    def counter_series(self, names: Collection[str], since_minute: int) -> list[MinuteCount]:
        """Give what was counted minute by minute, oldest first; minutes in which nothing was are left out."""
        ...

    def sweep_counters(self, kept_minutes: int, limit: int) -> int:
        """Remove the rows of minutes longer ago; the totals stay."""
        ...

    def fleet(self) -> Fleet:
        """Give all workers in a few numbers; as cheap with ten thousand."""
        ...

    # Operators ------------------------------------------------------------------------------

    def job(self, job_id: int) -> JobRecord | None: ...

    def jobs(self, where: JobFilter) -> list[JobRecord]:
        """Newest first; payload and result are left empty."""
        ...

    def count_jobs(self) -> dict[str, int]:
        """Count jobs by state."""
        ...

    def attempts(self, job_id: int) -> list[AttemptRecord]:
        """Oldest first, the current one included, each with its autopsy where there is one."""
        ...

    def progress(self, job_ids: Collection[int]) -> dict[int, Progress]:
        """Give how far these jobs said they were; the silent ones are left out."""
        ...

    def events(
        self,
        *,
        job_id: int | None = None,
        worker_id: str | None = None,
        after_id: int | None = None,
        limit: int = 100,
    ) -> list[EventRecord]:
        """Oldest first; with `after_id` those that follow, else the newest `limit`."""
        ...

    def outputs(self, job_id: int) -> list[OutputRecord]: ...

    def workers(self, living_only: bool = False) -> list[WorkerRecord]: ...

    def queues(self) -> list[QueueRecord]:
        """Every queue that has unfinished jobs, a living worker, a known task, or a pause."""
        ...

    def tasks(self) -> list[TaskRecord]: ...

    def pause(self, queue: str | None, by: str) -> list[str]:
        """Stop handing out jobs of one queue, or of all; give the queues that changed."""
        ...

    def resume(self, queue: str | None, by: str) -> list[str]: ...

    def request(self, worker_id: str, what: str, by: str) -> bool:
        """Ask a worker to 'drain' or 'stop'; False when it is not living."""
        ...

    def disable(self, worker_id: str, reason: str, by: str, *, auto: bool = False) -> bool:
        """Switch a living worker off, with an event; it hears of it in its next beat. False: it is not living, or off
        already. With `auto` it is also left alone where it is the last that serves one of its queues, which is looked
        at under a lock: two who switch off two at once cannot both be right."""
        ...

    def enable(self, worker_id: str, by: str, reason: str = "") -> bool:
        """Take that back, and forget the health that it reported; False when it was not switched off itself."""
        ...

    def disable_host(self, host: str, reason: str, by: str, *, auto: bool = False) -> bool:
        """The same for every worker of a host, those not born yet included; its name need not be known."""
        ...

    def enable_host(self, host: str, by: str, reason: str = "") -> bool:
        """Take that back; earlier deaths on that host count no more. False when it was not disabled."""
        ...

    def hosts(self) -> list[HostRecord]:
        """Give the hosts of which something was decided."""
        ...

    def cancel(self, job_ids: Collection[int], by: str) -> dict[int, str]:
        """Cancel: 'cancelled' (it waited or was only claimed), 'requested' (it runs; its worker is told),
        'finished' (too late), 'missing'."""
        ...

    def retry(self, job_ids: Collection[int], by: str) -> dict[int, str]:
        """Queue finished jobs again with fresh counters: 'queued', 'live' (not finished), 'succeeded', 'missing',
        'duplicate' (its unique key is in use by another live job)."""
        ...

    def stale(self, older_than_s: float) -> list[HeldJob]:
        """Give held jobs whose worker has been silent for at least so long (or is dead)."""
        ...

    def purge(self, queue: str, by: str) -> int:
        """Cancel every pending job of a queue."""
        ...

    def prune(self, older_than_s: float, states: Collection[str] = ()) -> int:
        """Remove finished jobs (of these final states; all of them where none is named)."""
        ...

    # Who may come in, and what was done -----------------------------------------------------

    def add_api_token(self, token: NewApiToken) -> None:
        """Write a token of the web door down; its id must be new."""
        ...

    def api_tokens(self) -> list[ApiTokenRecord]:
        """Give every token there ever was, oldest first: also those that are revoked or have expired."""
        ...

    def revoke_api_token(self, token_id: str) -> bool:
        """End a token for good; False where there is none that still stands."""
        ...

    def begin_audit(self, by: str, door: str, verb: str, target: str) -> int:
        """Write down what an operator is about to do, before it is done; gives the number of the note."""
        ...

    def end_audit(self, audit_id: int, outcome: str) -> None:
        """Add how it ended."""
        ...

    def audit(self, before_id: int | None = None, limit: int = 100) -> list[AuditRecord]:
        """Newest first."""
        ...

    def sweep_audit(self, older_than_s: float, limit: int) -> int:
        """Remove notes that are older than given."""
        ...

    # Alerts ---------------------------------------------------------------------------------

    def add_alert_target(self, target: str) -> None:
        """Write down, unless it is there, that this target (a fingerprint) is told of what happens from now on."""
        ...

    def alert_target(self, target: str) -> AlertTarget | None: ...

    def save_alert_target(self, target: str, version: int, event_id: int, state: str) -> bool:
        """Write how far it was told, if nobody did since this version was read; else False."""
        ...

    def events_to_tell(
        self, kinds: Collection[str], after_id: int, but: Collection[int], limit: int
    ) -> list[AlertEvent]:
        """Give events of these kinds, oldest first, without those whose ids are in `but`. Of events about jobs only
        'quarantined' is there to be told."""
        ...

    def look_for_conditions(self, late_s: float | None = None) -> ConditionLook:
        """Look, in bounded looks, at what conditions are found by. Late is who has been silent for so long; None: for
        so long that it is suspect."""
        ...

    def conditions(self) -> list[ConditionRecord]: ...

    def change_conditions(self, changes: Sequence[ConditionChange], remind_s: float) -> int:
        """Write what began, lasts (with an event `KIND_still`, at most once in `remind_s`) or is over (`KIND_over`).
        Each step has one event, however many take it at once; gives how many were written."""
        ...

    # Brokers --------------------------------------------------------------------------------

    def exchange(self, exchange: Exchange) -> ExchangeAnswer:
        """Do all of it in one commit, or nothing. A turn of a dead worker is answered as such, and the others are done
        all the same. RefusedValue for one value that cannot be stored: split it. Where it only wishes, and there is
        nothing to be had, nobody who writes is made to wait."""
        ...

    def letters(self, client: bytes, after_job_id: int = 0, limit: int = 1000) -> list[Letter]:
        """Give the unanswered letters of a client, in the order of their jobs. They go when their jobs go."""
        ...

    def letter(self, job_id: int) -> Letter | None:
        """Give the letter of a job, answered or not. A job that is enqueued again under its unique key gets the new
        one."""
        ...
