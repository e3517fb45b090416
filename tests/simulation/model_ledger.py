"""A ledger of plain Python objects: the pure rules alone, without any SQL, for many more seeds.

It knows what the simulation needs and nothing else. Every change of a state is checked against the transition tables.
"""

import copy
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, assert_never

from tests.simulation.scheduler import Machine

from unstuck import host
from unstuck.config import Recovery
from unstuck.domain.endings import Ending, Release
from unstuck.domain.liveness import OVERDUE_GRACE_S, OVERDUE_LOST_GRACE_S, Session
from unstuck.domain.recovery_rules import RecoveryRules
from unstuck.domain.states import (
    FINAL_STATES,
    HELD_STATES,
    LIVE_STATES,
    WORKER_TRANSITIONS,
    JobState,
    WorkerState,
    may_move,
)
from unstuck.domain.watch_clock import MAX_PERIODS, Begin, Extend, Keep, Period, SetBack, Tick, advance, watched_s
from unstuck.ledger.contract.admin import Fleet
from unstuck.ledger.contract.jobs import Enqueued, JobFilter, NewJob, Outcome
from unstuck.ledger.contract.maintenance import Expired, KeysChecked, Promoted, Swept
from unstuck.ledger.contract.recovery import (
    Guard,
    GuardDead,
    GuardNone,
    GuardSilent,
    GuardSuspect,
    GuardUnheard,
    Ticked,
    WorkerWatch,
)
from unstuck.ledger.contract.workers import (
    Claimed,
    Heartbeat,
    HeartbeatAnswer,
    HeldRecord,
    NewWorker,
    Turn,
    TurnAnswer,
    WorkerVerdict,
)
from unstuck.ledger.sqlite.maintenance import CLOCK_STEP_S, first_after_restore


@dataclass
class JobRow:
    id: int
    new: NewJob
    run_at: float
    state: JobState = JobState.PENDING
    worker_id: str | None = None
    token: int | None = None
    started_boot_s: float | None = None
    started_at: float | None = None
    claimed_at: float = 0.0
    failures: int = 0
    crashes: int = 0
    suspicions: int = 0
    tried: int = 0

    def move(self, state: JobState) -> None:
        assert may_move(self.state, state), f"job {self.id} may not go from {self.state} to {state}"
        self.state = state


@dataclass
class WorkerRow:
    birth: NewWorker
    beat_at: float
    state: WorkerState = WorkerState.ACTIVE
    verdict: WorkerVerdict | None = None
    suspect_boot_s: float | None = None

    @property
    def id(self) -> str:
        return self.birth.id

    def move(self, state: WorkerState) -> None:
        assert state in WORKER_TRANSITIONS[self.state], f"{self.id} may not go from {self.state} to {state}"
        self.state = state


@dataclass
class Tables:
    jobs: dict[int, JobRow] = field(default_factory=dict)
    workers: dict[str, WorkerRow] = field(default_factory=dict)
    periods: list[Period] = field(default_factory=list)
    tickets: dict[str, float] = field(default_factory=dict)
    last_job: int = 0
    last_token: int = 0
    ahead_s: float | None = None
    """How far the wall clock was ahead of the boot clock when a reaper last looked."""


class ModelLedger:
    """The verbs of the contract that the simulation calls."""

    single_host = True

    def __init__(self) -> None:
        self.tables = Tables()
        self.is_same: Callable[[], bool] = lambda: True

    # Clients ------------------------------------------------------------------------------------

    def enqueue(self, jobs: Sequence[NewJob]) -> list[Enqueued]:
        stored = []
        for job in jobs:
            self.tables.last_job += 1
            number = self.tables.last_job
            self.tables.jobs[number] = JobRow(number, job, _due_at(job.delay_s))
            stored.append(Enqueued(number))
        return stored

    def outcomes(self, job_ids: Collection[int]) -> list[Outcome]:
        found = [self.tables.jobs[one] for one in job_ids if one in self.tables.jobs]
        return [Outcome(job.id, job.state, None, None) for job in found if job.state in FINAL_STATES]

    def missing(self, job_ids: Collection[int]) -> set[int]:
        return set(job_ids) - set(self.tables.jobs)

    def jobs(self, where: JobFilter) -> list[JobRow]:
        return list(self.tables.jobs.values())

    # Workers ------------------------------------------------------------------------------------

    def register(self, birth: NewWorker) -> bool:
        self.tables.workers.setdefault(birth.id, WorkerRow(birth, self._heard_at()))
        return False

    def recovery_rules(self) -> list[RecoveryRules]:
        return [row.birth.rules for row in self.tables.workers.values() if row.birth.rules is not None]

    def _heard_at(self) -> float:
        """Return the time of a heartbeat: never before the last tick, if the clock was set back since."""
        return max([time.time(), *(period.until for period in self.tables.periods[-1:])])

    def beat(self, pulse: Heartbeat) -> HeartbeatAnswer:
        worker = self.tables.workers.get(pulse.worker_id)
        if worker is None:
            return HeartbeatAnswer(WorkerState.DEAD)
        if worker.state not in LIVE_STATES:
            return HeartbeatAnswer(worker.state)
        worker.beat_at = self._heard_at()
        was_suspect = worker.state is WorkerState.SUSPECT
        if was_suspect:
            worker.move(WorkerState.ACTIVE)
            worker.verdict = worker.suspect_boot_s = None
        return HeartbeatAnswer(worker.state, was_suspect)

    def turn(self, turn: Turn) -> TurnAnswer:
        worker = self.tables.workers.get(turn.worker_id)
        if worker is None or worker.state not in LIVE_STATES:
            return TurnAnswer(alive=False)
        superseded: set[tuple[int, int]] = set()
        for done in turn.done:
            job = self._held(turn.worker_id, done.job_id, done.token, JobState.RUNNING)
            if job is None:
                superseded.add((done.job_id, done.token))
            else:
                job.move(JobState.SUCCEEDED)
        written = self._end(turn.worker_id, turn.endings) | self._release(turn.worker_id, turn.release)
        superseded |= {(one.job_id, one.token) for one in (*turn.endings, *turn.release)} - written
        for held in turn.start:
            job = self._held(turn.worker_id, held.job_id, held.token, JobState.CLAIMED)
            if job is None:
                superseded.add((held.job_id, held.token))
            else:
                self._start(job)
        return TurnAnswer(True, self._claim(turn), frozenset(superseded), self._next_due_in_s())

    def _claim(self, turn: Turn) -> tuple[Claimed, ...]:
        if turn.claim_request is None:
            return ()
        now = time.time()
        ready = [job for job in self.tables.jobs.values() if job.state is JobState.PENDING and job.run_at <= now]
        claimed = []
        for job in sorted(ready, key=lambda one: one.id)[: turn.claim_request.limit]:
            self.tables.last_token += 1
            job.worker_id, job.token, job.claimed_at = turn.worker_id, self.tables.last_token, now
            job.tried += 1
            # Given back, it is ready at once.
            job.run_at = -math.inf
            running = len(claimed) < turn.claim_request.start
            if running:
                self._start(job)
            else:
                job.move(JobState.CLAIMED)
            claimed.append(_claimed(job, running))
        return tuple(claimed)

    def _start(self, job: JobRow) -> None:
        job.move(JobState.RUNNING)
        job.started_boot_s, job.started_at = host.boottime_s(), time.time()

    def held(self, worker_id: str) -> list[HeldRecord]:
        return self.held_jobs(worker_id, 1_000)

    def held_jobs(self, worker_id: str, limit: int) -> list[HeldRecord]:
        mine = [job for job in self.tables.jobs.values() if job.state in HELD_STATES and job.worker_id == worker_id]
        return [self._held_job(job) for job in mine][:limit]

    def blocked_outcomes(self, job_ids: Collection[int]) -> dict[int, str]:
        return {}

    def blocked_workers(self, worker_ids: Collection[str]) -> set[str]:
        return set()

    def retire(self, worker_id: str) -> None:
        worker = self.tables.workers.get(worker_id)
        if worker is not None and worker.state in LIVE_STATES:
            worker.move(WorkerState.STOPPED)

    # Reapers ------------------------------------------------------------------------------------

    def take_ticket(self, name: str, ttl_s: float) -> bool:
        now, until = time.time(), self.tables.tickets.get(name, -math.inf)
        # A ticket from a clock that was set back is nobody's.
        if now < until <= now + 2 * ttl_s:
            return False
        self.tables.tickets[name] = now + ttl_s
        return True

    def keep_watch(self, tick: Tick, ticket: str | None = None, ttl_s: float = 0.0) -> Ticked:
        periods, now = self.tables.periods, time.time()
        won = ticket is None or self.take_ticket(ticket, ttl_s)
        last = periods[-1] if periods else None
        if not won and last is not None and 0 <= now - last.until <= tick.every_s:
            stale_s = 0.0 if tick.overtaken(now) else now - last.until
            return Ticked(False, stale_s=stale_s, watched_s=last.until - last.since, at=now)
        change = advance(last, now, tick, same_server=self.is_same())
        if isinstance(change, Begin):
            periods.append(Period(change.since, now))
            del periods[:-MAX_PERIODS]
            gap_s = None if last is None else change.since - last.until
            return Ticked(won, watched_s=now - change.since, began=change.cause, gap_s=gap_s, at=now)
        assert last is not None
        match change:
            case Keep():
                stale_s = now - last.until if tick.claim_s is None else 0.0
                return Ticked(won, stale_s=stale_s, watched_s=last.until - last.since, at=now)
            case Extend():
                periods[-1] = Period(last.since, max(now, last.until))
                return Ticked(won, watched_s=periods[-1].until - last.since, at=now)
            case SetBack():
                self._set_back(change.step_s, now)
                if change.cause is None:
                    return Ticked(won, watched_s=last.until - last.since, set_back_s=change.step_s, at=now)
                self.tables.periods.append(Period(now, now))
                return Ticked(won, began=change.cause, gap_s=0.0, set_back_s=change.step_s, at=now)
            case _:
                assert_never(change)

    def _set_back(self, step_s: float, now: float) -> None:
        self.tables.periods = [Period(one.since - step_s, one.until - step_s) for one in self.tables.periods]
        for worker in self.tables.workers.values():
            worker.beat_at = min(worker.beat_at - step_s, now)

    def counted_s(self, beat_at: float) -> float:
        """Return the silence that counts."""
        return watched_s(self.tables.periods, beat_at)

    def watch(self, host: str | None = None) -> list[WorkerWatch]:
        found = [one for one in self.tables.workers.values() if host is None or one.birth.host == host]
        return [self._watch(one) for one in found if one.state in LIVE_STATES or self.held_jobs(one.id, 1)]

    def to_judge(self) -> tuple[list[WorkerWatch], int]:
        return self.watch(), 0

    def declare_dead(self, worker_id: str, verdict: WorkerVerdict, guard: Guard) -> bool:
        worker = self.tables.workers.get(worker_id)
        if worker is None or worker.state not in LIVE_STATES or not self._holds(worker, guard):
            return False
        if verdict.state is worker.state:
            return False
        worker.move(verdict.state)
        worker.verdict = verdict
        worker.suspect_boot_s = host.boottime_s()
        return True

    def settle(
        self, worker_id: str, endings: Sequence[Ending], releases: Sequence[Release], guard: Guard
    ) -> set[tuple[int, int]]:
        worker = self.tables.workers.get(worker_id)
        if worker is not None and not self._holds(worker, guard):
            return set()
        return self._end(worker_id, endings) | self._release(worker_id, releases)

    def overdue(self, limit: int) -> list[HeldRecord]:
        found = []
        for row in self.tables.jobs.values():
            if row.state is not JobState.RUNNING or row.new.timeout_s is None:
                continue
            job = self._held_job(row)
            worker = self.tables.workers[job.worker_id]
            well = worker.state in (WorkerState.ACTIVE, WorkerState.DRAINING)
            ran_s = min(job.running_s, self.counted_s(time.time() - job.running_s))
            if ran_s > row.new.timeout_s + (OVERDUE_GRACE_S if well else OVERDUE_LOST_GRACE_S):
                found.append(job)
        return found[:limit]

    def workers(self, living_only: bool = False) -> list[WorkerRow]:
        return [one for one in self.tables.workers.values() if not living_only or one.state in LIVE_STATES]

    def fleet(self) -> Fleet:
        return Fleet(workers=Counter(one.state for one in self.tables.workers.values()))

    # Housekeeping that has nothing to do here -----------------------------------------------------

    def promote_due(self, limit: int) -> Promoted:
        return Promoted(0, frozenset(), self._next_due_in_s())

    def expire_due(self, limit: int) -> Expired:
        return Expired(0, frozenset(), None)

    def check_keys(self, after: str, limit: int) -> KeysChecked:
        return KeysChecked(None, 0, 0, frozenset())

    def repair_workflows(self, limit: int) -> list[Any]:
        return []

    def follow_clock(self, limit: int) -> float:
        now, ahead_s = time.time(), time.time() - host.boottime_s()
        known_s, self.tables.ahead_s = self.tables.ahead_s, ahead_s
        step_s = 0.0 if known_s is None else known_s - ahead_s
        for job in self.tables.jobs.values():
            if job.state in HELD_STATES and job.started_at is not None and job.started_at > now + CLOCK_STEP_S:
                job.started_at = min(now, job.started_at - max(step_s, 0.0))
            if step_s >= CLOCK_STEP_S and job.state is JobState.PENDING and job.run_at > now and job.tried:
                job.run_at = max(now, job.run_at - step_s)
        return max(step_s, 0.0)

    def sweep_audit(self, *_: Any) -> int:
        return 0

    def sweep_counters(self, *_: Any) -> int:
        return 0

    def sweep_old(self, *_: Any) -> Swept:
        return Swept()

    def sweep_kept(self, *_: Any) -> Swept:
        return Swept()

    # ------------------------------------------------------------------------------------------

    def _held(self, worker_id: str, job_id: int, token: int, *states: JobState) -> JobRow | None:
        job = self.tables.jobs.get(job_id)
        if job is None or job.worker_id != worker_id or job.token != token or job.state not in (states or HELD_STATES):
            return None
        return job

    def _end(self, worker_id: str, endings: Sequence[Ending]) -> set[tuple[int, int]]:
        written = set()
        for ending in endings:
            job = self._held(worker_id, ending.job_id, ending.token, JobState.RUNNING)
            if job is None:
                continue
            job.move(ending.state)
            job.failures += ending.counter == "failure"
            job.crashes += ending.counter == "crash"
            job.suspicions += ending.counter in ("suspicion", "company")
            if ending.state is JobState.PENDING:
                job.worker_id = job.token = None
                job.run_at = _due_at(ending.delay_s)
            written.add((ending.job_id, ending.token))
        return written

    def _release(self, worker_id: str, releases: Sequence[Release]) -> set[tuple[int, int]]:
        written = set()
        for release in releases:
            job = self._held(worker_id, release.job_id, release.token)
            if job is not None:
                job.move(JobState.PENDING)
                job.worker_id = job.token = None
                written.add((release.job_id, release.token))
        return written

    def _holds(self, worker: WorkerRow, guard: Guard) -> bool:
        match guard:
            case GuardNone():
                return True
            case GuardDead():
                return worker.state not in LIVE_STATES
            case GuardSuspect():
                return worker.state is WorkerState.SUSPECT
            case GuardSilent():
                return self.counted_s(worker.beat_at) >= guard.silent_s
            case GuardUnheard():
                return time.time() - worker.beat_at >= guard.silent_s
            case _:
                assert_never(guard)

    def _patience_s(self, job: JobRow, worker: WorkerRow) -> float | None:
        if not job.new.heartbeat:
            return None
        return job.new.heartbeat_timeout_s or worker.birth.running_stale_after_s

    def _watch(self, worker: WorkerRow) -> WorkerWatch:
        birth = worker.birth
        mine = [job for job in self.tables.jobs.values() if job.state in HELD_STATES and job.worker_id == worker.id]
        running = [self._patience_s(job, worker) for job in mine if job.state is JobState.RUNNING]
        timed = [one for one in running if one is not None]
        return WorkerWatch(
            id=birth.id,
            name=birth.name,
            host=birth.host,
            pid=birth.pid,
            boot_id=birth.boot_id,
            pid_namespace=birth.pid_namespace,
            process_started=birth.process_started,
            status_page=birth.status_page,
            state=worker.state,
            silent_s=self.counted_s(worker.beat_at),
            suspect_after_s=birth.suspect_after_s,
            waits_for_s=max((math.inf if one is None else one for one in running), default=None),
            held=len(mine),
            session=Session.UNKNOWN,
            suspect_s=0.0 if worker.suspect_boot_s is None else host.boottime_s() - worker.suspect_boot_s,
            shortest_s=min(timed, default=None),
            since_beat_s=time.time() - worker.beat_at,
            heartbeat_interval_s=birth.heartbeat_interval_s,
            suspected_by=None if worker.verdict is None else worker.verdict.detector,
            rules=birth.rules,
        )

    def _held_job(self, job: JobRow) -> HeldRecord:
        assert job.worker_id is not None
        assert job.token is not None
        worker = self.tables.workers[job.worker_id]
        running_s = 0.0
        if job.state is JobState.RUNNING and job.started_boot_s is not None:
            running_s = max(0.0, host.boottime_s() - job.started_boot_s)
        new = job.new
        counts = (job.failures, job.crashes, False, new.timeout_s, self._patience_s(job, worker))
        silent_s = self.counted_s(worker.beat_at)
        return HeldRecord(
            *(job.id, job.token, worker.id, job.state, new.task, new.queue, new.policy),
            *counts,
            *(max(0.0, time.time() - job.claimed_at), running_s, silent_s, job.suspicions),
        )

    def _next_due_in_s(self) -> float | None:
        due = [job.run_at for job in self.tables.jobs.values() if job.state is JobState.PENDING]
        later = [at - time.time() for at in due if at > time.time()]
        return min(later, default=None)


class ModelStorage:
    """A model ledger that can be put back to an earlier state."""

    def __init__(self, recovery: Recovery) -> None:
        self.ledger = ModelLedger()

    def notice_failovers(self, is_same: Callable[[], bool]) -> None:
        self.ledger.is_same = is_same

    def set_time(self, machine: Machine, incarnation: int) -> None:
        """Do nothing: it reads the clocks of the simulation itself."""

    def save(self) -> Tables:
        return copy.deepcopy(self.ledger.tables)

    def restore(self, saved: Tables) -> None:
        self.ledger.tables = saved

    def skip_lost_numbers(self) -> None:
        tables, now = self.ledger.tables, time.time()
        tables.last_job = first_after_restore(tables.last_job, now)
        tables.last_token = first_after_restore(tables.last_token, now)

    def close(self) -> None:
        """Leave nothing behind: it was only in memory."""


def _due_at(delay_s: float) -> float:
    """Return when a job may begin; one that need not wait is ready, whatever the clock says."""
    return time.time() + delay_s if delay_s > 0 else -math.inf


def _claimed(job: JobRow, running: bool) -> Claimed:
    assert job.token is not None
    new = job.new
    return Claimed(
        *(job.id, job.token, new.task, new.queue, running, new.payload, new.payload_type, new.policy),
        *(job.failures, job.crashes, job.tried, job.suspicions),
    )
