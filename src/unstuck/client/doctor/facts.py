"""The facts that the doctor's checks look at, how they are gathered, and the thresholds of the checks."""

import time
from collections.abc import Iterator
from typing import Any, Literal, TypeVar

import msgspec

from unstuck import host
from unstuck.client.reasons import is_healthy
from unstuck.config import Settings
from unstuck.domain.states import LIVE_STATES, JobState, Transport, WorkerState
from unstuck.domain.workflows import WorkflowState
from unstuck.errors import LedgerBusy, LedgerError, LedgerStandby, NoLedger, SchemaAhead, SchemaForked, SchemaMismatch
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.diagnosis import Blocker, Diagnosis, QueueBacklog
from unstuck.ledger.contract.jobs import JobRecord, TaskRecord
from unstuck.ledger.contract.queues import KeyRecord
from unstuck.ledger.contract.schedules import ScheduleRecord
from unstuck.ledger.contract.workers import WorkerRecord
from unstuck.ledger.contract.workflows import WorkflowRecord
from unstuck.metrics.catalogue import MDP_DROPPED
from unstuck.metrics.counters import decode_labels
from unstuck.notify.failures import NO_FAILURES, Failures, look_at_failures

TroubleKind = Literal["unreachable", "busy", "standby", "none", "behind", "ahead", "forked"]


class Thresholds(msgspec.Struct, frozen=True):
    """From where on the doctor speaks up."""

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


class LedgerTrouble(msgspec.Struct, frozen=True):
    """Why the ledger could not be looked at."""

    kind: TroubleKind
    message: str


class IdleLook(msgspec.Struct, frozen=True):
    """Two looks at a worker that had free slots while jobs it knows were ready, or held some that it did not run."""

    before: WorkerRecord
    after: WorkerRecord
    apart_s: float
    ready_ids: tuple[int, ...]
    """The first in line at the first look."""
    left_ids: tuple[int, ...]
    """Those of them that were still ready at the second."""
    queues: tuple[str, ...]


class Facts(msgspec.Struct, frozen=True):
    settings: Settings
    host: str
    """The name of the machine that the doctor runs on."""
    trouble: LedgerTrouble | None = None
    diagnosis: Diagnosis | None = None
    workers: tuple[WorkerRecord, ...] = ()
    standstills: tuple[IdleLook, ...] = ()
    paused: tuple[WorkflowRecord, ...] = ()
    """Workflows that wait for an operator, the newest first, with their nodes."""
    schedules: tuple[ScheduleRecord, ...] = ()
    concurrency_keys: tuple[KeyRecord, ...] = ()
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
        return [worker for worker in self.workers if worker.state in LIVE_STATES]


T = TypeVar("T", bool, float, str)


def setting_of(worker: WorkerRecord, name: str, kind: type[T]) -> T | None:
    """Give one of the settings that a worker lives by, or None where it did not say."""
    settings = own(worker).get("settings")
    return _as(settings.get(name), kind) if isinstance(settings, dict) else None


def note_of(worker: WorkerRecord, name: str, kind: type[T]) -> T | None:
    """Give a fact that a worker noted beside its settings."""
    return _as(own(worker).get(name), kind)


def own(worker: WorkerRecord) -> dict[str, Any]:
    """Give the metadata of one of our own workers, nothing of a foreign one."""
    return worker.metadata if worker.transport is Transport.PYTHON else {}


def _as(value: object, kind: type[T]) -> T | None:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return kind(value)
    return value if isinstance(value, kind) else None


LOOK_AGAIN_S = 10.0
"""How long we wait at most for the next beat of a worker that seems to do nothing."""
LOOK_EVERY_S = 0.1
ALONE_S = 1.0
MAX_SUSPECTED = 20
MAX_FIRST_IN_LINE = 5
MAX_HELD = 1_000
MAX_LINES = 1_000
MAX_PAUSED = 5


def gather(
    ledger: Ledger, settings: Settings, limits: Thresholds | None = None, *, about: JobRecord | None = None
) -> Facts:
    """Look at everything once; trouble with the ledger is a fact like any other.

    `about`: only workers that concern this job are looked at twice, which takes seconds."""
    limits = limits or Thresholds()
    blockers: tuple[Blocker, ...] = ()
    try:
        ledger.check_schema()
        blockers = ledger.blockers(open_s=limits.blocking_s)
        # Where nobody lives, nobody will come by to make a due job ready: no patience is due either.
        served = any(worker.state in LIVE_STATES for worker in ledger.workers.list())
        diagnosis = ledger.diagnose(far_s=limits.far_s, late_s=limits.late_s if served else min(limits.late_s, ALONE_S))
        workers = tuple(ledger.workers.list())
        schedules = tuple(ledger.schedules.list())
        tasks = tuple(ledger.queues.tasks())
        limited = frozenset(one.name for one in ledger.queues.limits() if one.limit)
        standstills = _look_twice(ledger, settings, diagnosis, _concerned(workers, about), limited)
        lines = tuple(ledger.queues.concurrency_keys(limit=MAX_LINES))
        paused = tuple(look_at_paused(ledger))
        failures = look_at_failures(ledger, settings.alerts.failure_rate)
        dropped = read_dropped(ledger, limits.dropped_s)
    except LedgerBusy as error:
        blockers = blockers or _blockers(ledger, limits)
        return Facts(settings, host.hostname(), trouble=trouble_of(error), blockers=blockers)
    except LedgerError as error:
        return Facts(settings, host.hostname(), trouble=trouble_of(error))
    return Facts(
        settings,
        host.hostname(),
        diagnosis=diagnosis,
        workers=workers,
        standstills=standstills,
        paused=paused,
        schedules=schedules,
        concurrency_keys=lines,
        tasks=tasks,
        failures=failures,
        dropped=dropped,
        blockers=blockers,
    )


def _blockers(ledger: Ledger, limits: Thresholds) -> tuple[Blocker, ...]:
    """Return what is in the way of a ledger that could not be read."""
    try:
        return ledger.blockers(open_s=limits.blocking_s)
    except LedgerError:
        return ()


def look_at_paused(ledger: Ledger) -> Iterator[WorkflowRecord]:
    """Yield the newest workflows that wait for an operator, with their nodes."""
    for found in ledger.workflows.list(WorkflowState.PAUSED, limit=MAX_PAUSED):
        yield ledger.workflows.get(found.id) or found


def trouble_of(error: LedgerError) -> LedgerTrouble:
    message = str(error)
    match error:
        case SchemaAhead():
            return LedgerTrouble("ahead", message)
        case SchemaForked():
            return LedgerTrouble("forked", message)
        case NoLedger():
            return LedgerTrouble("none", message)
        case SchemaMismatch():
            return LedgerTrouble("behind", message)
        case LedgerBusy():
            return LedgerTrouble("busy", message)
        case LedgerStandby():
            return LedgerTrouble("standby", message)
        case _:
            return LedgerTrouble("unreachable", message)


def _concerned(workers: tuple[WorkerRecord, ...], about: JobRecord | None) -> tuple[WorkerRecord, ...]:
    """Return those of the workers that could take a job or hold it; all of them if it is not about one job."""
    if about is None:
        return workers
    waits = about.state is JobState.PENDING
    return tuple(one for one in workers if one.id == about.worker_id or (waits and about.queue in one.queues))


def _look_twice(
    ledger: Ledger,
    settings: Settings,
    diagnosis: Diagnosis,
    workers: tuple[WorkerRecord, ...],
    limited: frozenset[str],
) -> tuple[IdleLook, ...]:
    """Look again at workers with free slots that leave jobs waiting, when they have had a chance to take one."""
    # A bell that was not heard costs a poll interval: a job must have been ready for longer than that.
    settled_s = 2 * settings.poll_interval_s + 1.0
    suspected: list[tuple[WorkerRecord, tuple[int, ...], tuple[str, ...]]] = []
    for worker in workers:
        # A queue with a limit gives what it may: jobs that stay in it are no sign of an idle worker.
        open_queues = [queue for queue in diagnosis.queues if queue.name in worker.queues and queue.name not in limited]
        # One that is not waited for has had a whole interval already, in which it took none of them.
        ready_s = settled_s if _beats_soon(worker) else max(settled_s, worker.heartbeat_interval_s)
        lines = [_first_in_line(queue, worker, ready_s) for queue in open_queues]
        ready = sorted(job_id for line in lines for job_id in line)[:MAX_FIRST_IN_LINE]
        seems_idle = (bool(ready) and has_room(worker)) or (sits_on_jobs(worker) and _held_more(ledger, worker))
        if seems_idle and len(suspected) < MAX_SUSPECTED:
            served = {queue.name for queue in diagnosis.queues if not queue.paused}
            suspected.append((worker, tuple(ready), tuple(sorted(served & set(worker.queues)))))
    if not suspected:
        return ()
    started_s = time.monotonic()
    after = _wait_for_beats(ledger, [worker for worker, _, _ in suspected], settings.poll_interval_s)
    apart_s = time.monotonic() - started_s
    return tuple(
        IdleLook(worker, after[worker.id], apart_s, ready, _still_ready(ledger, ready), queues)
        for worker, ready, queues in suspected
        if worker.id in after
    )


def _beats_soon(worker: WorkerRecord) -> bool:
    """Return whether it is worth waiting for the next beat of a worker: remote ones beat every 30 s."""
    return worker.heartbeat_interval_s <= LOOK_AGAIN_S


def _held_more(ledger: Ledger, worker: WorkerRecord) -> bool:
    """Say whether it held more when it last beat than it said to run: what it took since then is told with the next."""
    held = ledger.recovery.held_jobs(worker.id, MAX_HELD)
    return sum(job.held_s > worker.silent_s for job in held) > worker.running


def _first_in_line(queue: QueueBacklog, worker: WorkerRecord, settled_s: float) -> list[int]:
    if queue.paused:
        return []
    return [look.first_id for look in queue.tasks if look.task in worker.tasks and look.waited_s > settled_s]


def _wait_for_beats(ledger: Ledger, suspected: list[WorkerRecord], least_s: float) -> dict[str, WorkerRecord]:
    """Wait until each of them has beaten once more, so that what it did since has been counted; not for ever."""
    seen = {worker.id: worker.last_seen_at for worker in suspected}
    started_s = time.monotonic()
    while True:
        time.sleep(LOOK_EVERY_S)
        found = {worker.id: worker for worker in ledger.workers.list(living_only=True) if worker.id in seen}
        waited_s = time.monotonic() - started_s
        beaten = all(worker.last_seen_at > seen[worker.id] for worker in found.values() if _beats_soon(worker))
        if waited_s >= LOOK_AGAIN_S or (beaten and waited_s >= least_s):
            return found


def _still_ready(ledger: Ledger, job_ids: tuple[int, ...]) -> tuple[int, ...]:
    records = (ledger.jobs.get(job_id) for job_id in job_ids)
    return tuple(record.id for record in records if record is not None and record.state is JobState.PENDING)


def has_room(worker: WorkerRecord) -> bool:
    """Say whether a worker could take a job now."""
    return _may_work(worker) and max(worker.running, worker.held) < worker.concurrency


def sits_on_jobs(worker: WorkerRecord) -> bool:
    """Say whether a worker holds jobs that none of its runners has, although a slot is free for one."""
    return _may_work(worker) and worker.running < min(worker.held, worker.concurrency)


def _may_work(worker: WorkerRecord) -> bool:
    active = worker.state is WorkerState.ACTIVE and not worker.request and worker.disabled is None
    return active and is_healthy(worker)


ROUTINE = frozenset({"a reply that came too late"})
"""What happens after every death, and loses nothing."""


def read_dropped(ledger: Ledger, within_s: float) -> dict[str, int]:
    """Return how many messages were dropped lately, by why."""
    counts = ledger.admin.counter_sums(MDP_DROPPED.name, int((time.time() - within_s) // 60))
    found = {decode_labels(one.labels)["why"]: round(one.value) for one in counts}
    return {why: messages for why, messages in found.items() if messages and why not in ROUTINE}
