"""Gather the facts: ask the ledger and this host, and look twice at workers that seem to do nothing."""

import secrets
import time
from collections.abc import Iterator

from unstuck import host
from unstuck.client.doctor.dropped import look_at_dropped
from unstuck.client.doctor.facts import Facts, Host, Limits, Standstill, Trouble
from unstuck.client.doctor.fleet import has_room, sits_on_jobs
from unstuck.client.doctor.metadata import noted
from unstuck.config import Settings
from unstuck.domain.errors import (
    LedgerBusy,
    LedgerError,
    LedgerStandby,
    NoLedger,
    SchemaAhead,
    SchemaForked,
    SchemaMismatch,
)
from unstuck.domain.states import LIVING, JobState
from unstuck.domain.workflow import WorkflowState
from unstuck.notify.failures import look_at_failures
from unstuck.runner import containment
from unstuck.store.contract import Ledger
from unstuck.store.diagnosis import Blocker, Diagnosis, QueueLook
from unstuck.store.records import JobRecord, WorkerRecord, WorkflowRecord

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
    ledger: Ledger, settings: Settings, limits: Limits | None = None, *, about: JobRecord | None = None
) -> Facts:
    """Look at everything once; trouble with the ledger is a fact like any other.

    `about`: only workers that concern this job are looked at twice, which takes seconds."""
    limits = limits or Limits()
    blockers: tuple[Blocker, ...] = ()
    try:
        ledger.check_schema()
        blockers = ledger.blockers(open_s=limits.blocking_s)
        # Where nobody lives, nobody will come by to make a due job ready: no patience is due either.
        served = any(worker.state in LIVING for worker in ledger.workers())
        diagnosis = ledger.diagnose(far_s=limits.far_s, late_s=limits.late_s if served else min(limits.late_s, ALONE_S))
        workers = tuple(ledger.workers())
        schedules = tuple(ledger.schedules())
        tasks = tuple(ledger.tasks())
        limited = frozenset(one.name for one in ledger.queue_limits() if one.limit)
        standstills = _look_twice(ledger, settings, diagnosis, _concerned(workers, about), limited)
        lines = tuple(ledger.lines(limit=MAX_LINES))
        paused = tuple(_paused(ledger))
        failures = look_at_failures(ledger, limits.failing_share)
        dropped = look_at_dropped(ledger, limits.dropped_s)
    except LedgerBusy as error:
        blockers = blockers or _blockers(ledger, limits)
        return Facts(settings, look_at_host(()), trouble=trouble_of(error), blockers=blockers)
    except LedgerError as error:
        return Facts(settings, look_at_host(()), trouble=trouble_of(error))
    return Facts(
        settings,
        look_at_host(workers),
        diagnosis=diagnosis,
        workers=workers,
        standstills=standstills,
        paused=paused,
        schedules=schedules,
        lines=lines,
        tasks=tasks,
        failures=failures,
        dropped=dropped,
        blockers=blockers,
    )


def _blockers(ledger: Ledger, limits: Limits) -> tuple[Blocker, ...]:
    """Return what is in the way of a ledger that could not be read."""
    try:
        return ledger.blockers(open_s=limits.blocking_s)
    except LedgerError:
        return ()


def _paused(ledger: Ledger) -> Iterator[WorkflowRecord]:
    for found in ledger.workflows(WorkflowState.PAUSED, limit=MAX_PAUSED):
        yield ledger.workflow(found.id) or found


def trouble_of(error: LedgerError) -> Trouble:
    message = str(error)
    match error:
        case SchemaAhead():
            return Trouble("ahead", message)
        case SchemaForked():
            return Trouble("forked", message)
        case NoLedger():
            return Trouble("none", message)
        case SchemaMismatch():
            return Trouble("behind", message)
        case LedgerBusy():
            return Trouble("busy", message)
        case LedgerStandby():
            return Trouble("standby", message)
        case _:
            return Trouble("unreachable", message)


def look_at_host(workers: tuple[WorkerRecord, ...]) -> Host:
    """Look at this machine's means of containment, unless a worker here has said already what it found."""
    name = host.hostname()
    if any(worker.host == name and worker.state in LIVING and noted(worker, "containment", str) for worker in workers):
        return Host(name)
    found = containment.detect(secrets.token_hex(8))
    try:
        return Host(name, found.describe(), containment.oom_group())
    finally:
        found.close()


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
) -> tuple[Standstill, ...]:
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
        Standstill(worker, after[worker.id], apart_s, ready, _still_ready(ledger, ready), queues)
        for worker, ready, queues in suspected
        if worker.id in after
    )


def _beats_soon(worker: WorkerRecord) -> bool:
    """Return whether it is worth waiting for the next beat of a worker: remote ones beat every 30 s."""
    return worker.heartbeat_interval_s <= LOOK_AGAIN_S


def _held_more(ledger: Ledger, worker: WorkerRecord) -> bool:
    """Say whether it held more when it last beat than it said to run: what it took since then is told with the next."""
    held = ledger.held_by(worker.id, MAX_HELD)
    return sum(job.held_s > worker.silent_s for job in held) > worker.running


def _first_in_line(queue: QueueLook, worker: WorkerRecord, settled_s: float) -> list[int]:
    if queue.paused:
        return []
    return [look.first_id for look in queue.tasks if look.task in worker.tasks and look.waited_s > settled_s]


def _wait_for_beats(ledger: Ledger, suspected: list[WorkerRecord], least_s: float) -> dict[str, WorkerRecord]:
    """Wait until each of them has beaten once more, so that what it did since has been counted; not for ever."""
    seen = {worker.id: worker.last_seen_at for worker in suspected}
    started_s = time.monotonic()
    while True:
        time.sleep(LOOK_EVERY_S)
        found = {worker.id: worker for worker in ledger.workers(living_only=True) if worker.id in seen}
        waited_s = time.monotonic() - started_s
        beaten = all(worker.last_seen_at > seen[worker.id] for worker in found.values() if _beats_soon(worker))
        if waited_s >= LOOK_AGAIN_S or (beaten and waited_s >= least_s):
            return found


def _still_ready(ledger: Ledger, job_ids: tuple[int, ...]) -> tuple[int, ...]:
    records = (ledger.job(job_id) for job_id in job_ids)
    return tuple(record.id for record in records if record is not None and record.state is JobState.PENDING)
