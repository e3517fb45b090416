"""Write verdicts and settle what the dead held: guarded, so that a beat in between always wins."""

import time
from collections.abc import Sequence
from typing import assert_never

import apsw
import msgspec

from unstuck.domain.autopsy import LastWords, said_fields
from unstuck.domain.endings import Ending, Release
from unstuck.domain.liveness import OVERDUE_GRACE_S, OVERDUE_LOST_GRACE_S
from unstuck.domain.recovery_rules import RecoveryRules, read_all
from unstuck.domain.states import LIVE_STATES, JobState, WorkerState
from unstuck.domain.watch_clock import MAX_PERIODS, MOST_PERIODS, Begin, Extend, Keep, Period, SetBack, Tick, advance
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
from unstuck.ledger.contract.workers import HeldRecord, WorkerVerdict
from unstuck.ledger.sqlite.clock import read_clock
from unstuck.ledger.sqlite.database import SQL, Database, fetch, write_event
from unstuck.ledger.sqlite.endings import Ended, after_end, end_attempts, write_releases
from unstuck.ledger.sqlite.errors import refuse_nul
from unstuck.ledger.sqlite.maintenance import is_taken, take
from unstuck.ledger.sqlite.notifier import Notifier
from unstuck.ledger.sqlite.rows import held_job, worker_watch


class Recovery:
    """See `unstuck.ledger.contract.recovery.Recovery`."""

    def __init__(self, db: Database, wakeups: Notifier) -> None:
        self._db = db
        self._wakeups = wakeups

    def tick(self, tick: Tick, ticket: str | None = None, ttl_s: float = 0.0) -> Ticked:
        with self._db.read() as cursor:
            last = _last_period(cursor)
            taken = ticket is not None and is_taken(cursor, ticket)
        now = time.time()
        if taken and last is not None and 0 <= now - last.until <= tick.every_s:
            # Others keep the watch. Most ask in vain, and must not queue for the write lock to hear it.
            stale_s = 0.0 if tick.overtaken(now) else now - last.until
            return Ticked(False, stale_s=stale_s, watched_s=last.until - last.since, at=now)
        with self._db.write(durable=False) as cursor:
            won = ticket is None or take(cursor, ticket, ttl_s)
            # The clock is read under the lock: whoever waited for it must not vouch for the time of waiting.
            return _keep_watch(cursor, tick, time.time(), won)

    def watch(self, host: str | None = None) -> list[WorkerWatch]:
        with self._db.read() as cursor:
            clock = read_clock(cursor)
            return [worker_watch(row, clock) for row in cursor.execute(SQL["watch"], (host,))]

    def to_judge(self) -> tuple[list[WorkerWatch], int]:
        with self._db.read() as cursor:
            clock = read_clock(cursor)
            rows = cursor.execute(SQL["to_judge"], (clock.at,))
            workers = [worker_watch(row, clock) for row in rows]
            living = cursor.execute(SQL["count_living"]).get
        return workers, max(0, living - sum(1 for worker in workers if worker.state in LIVE_STATES))

    def rules(self) -> list[RecoveryRules]:
        with self._db.read() as cursor:
            return read_all(text for (text,) in fetch(cursor, "recovery_rules"))

    def peers_of(self, worker_id: str, host: str, size: int) -> list[WorkerWatch]:
        with self._db.read() as cursor:
            clock = read_clock(cursor)
            return [worker_watch(row, clock) for row in cursor.execute(SQL["ring_of"], (worker_id, host, size))]

    def declare_dead(self, worker_id: str, verdict: WorkerVerdict, guard: Guard) -> bool:
        assert verdict.state in (WorkerState.SUSPECT, WorkerState.DEAD), verdict.state
        refuse_nul(verdict.evidence, verdict.by)
        with self._db.write() as cursor:
            if not _holds(cursor, worker_id, guard):
                return False
            text = msgspec.json.encode(verdict).decode()
            if verdict.state is WorkerState.DEAD:
                cursor.execute(SQL["bury_worker"], (worker_id, text, time.time()))
                kind, sentence = "worker_dead", f"Dead worker detected: {worker_id}"
            else:
                cursor.execute(SQL["suspect_worker"], (worker_id, text, read_clock().boot_s))
                kind, sentence = "worker_suspect", f"Suspect worker: {worker_id}"
            if not cursor.connection.changes():
                return False
            message = f"{sentence} ({verdict.evidence}; {verdict.detector}, by {verdict.by})"
            write_event(cursor, kind, message, worker_id=worker_id)
        return True

    def amend_verdict(self, worker_id: str, verdict: WorkerVerdict) -> bool:
        refuse_nul(verdict.evidence, verdict.by)
        with self._db.write() as cursor:
            cursor.execute(SQL["amend"], (worker_id, msgspec.json.encode(verdict).decode()))
            return bool(cursor.connection.changes())

    def held_jobs(self, worker_id: str, limit: int) -> list[HeldRecord]:
        return held_by(self._db, worker_id, limit)

    def settle(
        self, worker_id: str, endings: Sequence[Ending], releases: Sequence[Release], guard: Guard
    ) -> set[tuple[int, int]]:
        if not endings and not releases:
            return set()
        with self._db.write() as cursor:
            if not _holds(cursor, worker_id, guard):
                return set()
            tied: list[Ended] = []
            written = end_attempts(cursor, worker_id, endings, tied) | write_releases(cursor, worker_id, releases, tied)
            woken = after_end(cursor, tied)
        self._wakeups.notify_queues(woken)
        return written

    def overdue(self, limit: int) -> list[HeldRecord]:
        found = []
        with self._db.read() as cursor:
            clock = read_clock(cursor)
            for row in cursor.execute(SQL["held_by_anyone"]):
                job, worker_state = held_job(row, clock), row[17]
                if job.timeout_s is None or job.state is not JobState.RUNNING:
                    continue
                if job.deferred and worker_state in LIVE_STATES:
                    # Its code has ended: it is not late, its outcome only waits for a lock.
                    continue
                well = worker_state in (WorkerState.ACTIVE, WorkerState.DRAINING)
                # Only watched time: a worker that could not be heard is not past any deadline.
                ran_s = min(job.running_s, clock.counted_s(clock.at - job.running_s))
                if ran_s > job.timeout_s + (OVERDUE_GRACE_S if well else OVERDUE_LOST_GRACE_S):
                    found.append(job)
        return found[:limit]

    def add_last_words(self, words: Sequence[LastWords]) -> None:
        rows = [(one.job_id, one.token, msgspec.json.encode(said_fields(one)).decode()) for one in words]
        with self._db.write() as cursor:
            cursor.executemany(SQL["add_last_words"], rows)

    def stale(self, older_than_s: float) -> list[HeldRecord]:
        with self._db.read() as cursor:
            clock = read_clock(cursor)
            jobs = [(held_job(row, clock), row[17]) for row in cursor.execute(SQL["held_by_anyone"])]
        return [job for job, state in jobs if state not in LIVE_STATES or job.silent_s >= older_than_s]


def held_by(db: Database, worker_id: str, limit: int) -> list[HeldRecord]:
    """Return what a worker holds by the ledger, oldest first."""
    with db.read() as cursor:
        clock = read_clock(cursor)
        return [held_job(row, clock) for row in cursor.execute(SQL["held_by"], (worker_id, limit))]


def _keep_watch(cursor: apsw.Cursor, tick: Tick, now: float, won: bool) -> Ticked:
    """Extend the watch, or begin a new period, under the write lock."""
    last = _last_period(cursor)
    change = advance(last, now, tick)
    if isinstance(change, Begin):
        gap_s = None if last is None else change.since - last.until
        _begin_period(cursor, change, now, gap_s)
        # The clock may have been ahead for a while that no reaper saw.
        cursor.execute(SQL["end_future_beats"], (now,))
        return Ticked(won, watched_s=now - change.since, began=change.cause, gap_s=gap_s, at=now)
    assert last is not None, "the first tick begins a period"
    match change:
        case Keep():
            # A tick that was late vouches for none of the time before it, now or with its next one.
            stale_s = now - last.until if tick.claim_s is None else 0.0
            return Ticked(won, stale_s=stale_s, watched_s=last.until - last.since, at=now)
        case Extend():
            until = max(now, last.until)
            cursor.execute(SQL["extend_watch"], (until,))
            return Ticked(won, watched_s=until - last.since, at=now)
        case SetBack():
            cursor.execute(SQL["set_back_periods"], (change.step_s,))
            cursor.execute(SQL["set_back_beats"], (change.step_s, now))
            cursor.execute(SQL["note_step_back"], (change.step_s, now))
            if change.cause is None:
                return Ticked(won, watched_s=last.until - last.since, set_back_s=change.step_s, at=now)
            _begin_period(cursor, Begin(now, change.cause), now, 0.0)
            return Ticked(won, began=change.cause, gap_s=0.0, set_back_s=change.step_s, at=now)
        case _:
            assert_never(change)


def _begin_period(cursor: apsw.Cursor, begin: Begin, now: float, gap_s: float | None) -> None:
    cursor.execute(SQL["begin_watch"], (begin.since, now, begin.cause, gap_s))
    cursor.execute(SQL["drop_old_periods"], (MAX_PERIODS, MOST_PERIODS))


def _last_period(cursor: apsw.Cursor) -> Period | None:
    row = cursor.execute(SQL["last_period"]).fetchone()
    return None if row is None else Period(*row)


def _holds(cursor: apsw.Cursor, worker_id: str, guard: Guard) -> bool:
    """Look at the evidence again, under the write lock: from here to the commit nobody can beat."""
    found = cursor.execute(SQL["worker_evidence"], (worker_id,)).fetchone()
    state, beat_at = found or (None, None)
    match guard:
        case GuardNone():
            return True
        case GuardDead():
            # A missing row means dead: beats never insert one.
            return state not in LIVE_STATES
        case GuardSuspect():
            return state == WorkerState.SUSPECT
        case GuardSilent():
            return read_clock(cursor).counted_s(beat_at) >= guard.silent_s
        case GuardUnheard():
            return read_clock(cursor).silent_s(beat_at) >= guard.silent_s
        case _:
            assert_never(guard)
