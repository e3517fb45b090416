"""Write verdicts and settle what the dead held: guarded, so that a beat in between always wins."""

import time
from collections.abc import Sequence
from typing import assert_never

import apsw
import msgspec

from unstuck.domain.endings import Ending, Release
from unstuck.domain.states import LIVING, JobState, WorkerState
from unstuck.store.manners import politely
from unstuck.store.overdue import OVERDUE_GRACE_S, OVERDUE_LOST_GRACE_S
from unstuck.store.records import (
    Guard,
    GuardDead,
    GuardNone,
    GuardSilent,
    GuardSuspect,
    HeldJob,
    WorkerVerdict,
    WorkerWatch,
)
from unstuck.store.sqlite.endings import write_endings, write_releases
from unstuck.store.sqlite.errors import refuse_nul
from unstuck.store.sqlite.rows import held_job, worker_watch
from unstuck.store.sqlite.silence import read_clock
from unstuck.store.sqlite.ties import Ended, settled
from unstuck.store.sqlite.verbs import SQL, Verbs, write_event


class ReaperVerbs(Verbs):
    def watch(self, host: str | None = None) -> list[WorkerWatch]:
        with self.db.read() as cursor:
            clock = read_clock(cursor)
            return [worker_watch(row, clock) for row in cursor.execute(SQL["watch"], (host,))]

    def to_judge(self) -> tuple[list[WorkerWatch], int]:
        with self.db.read() as cursor:
            clock = read_clock(cursor)
            forgiven_s = clock.amnesty_boot_s or 0.0
            rows = cursor.execute(SQL["to_judge"], (clock.boot_s, clock.boot_id, forgiven_s))
            workers = [worker_watch(row, clock) for row in politely(rows)]
            living = cursor.execute(SQL["count_living"]).get
        return workers, max(0, living - sum(1 for worker in workers if worker.state in LIVING))

    def ring_of(self, worker_id: str, host: str, size: int) -> list[WorkerWatch]:
        with self.db.read() as cursor:
            clock = read_clock(cursor)
            return [worker_watch(row, clock) for row in cursor.execute(SQL["ring_of"], (worker_id, host, size))]

    def condemn(self, worker_id: str, verdict: WorkerVerdict, guard: Guard) -> bool:
        assert verdict.state in (WorkerState.SUSPECT, WorkerState.DEAD), verdict.state
        refuse_nul(verdict.evidence, verdict.by)
        with self.db.write() as cursor:
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

    def amend(self, worker_id: str, verdict: WorkerVerdict) -> bool:
        refuse_nul(verdict.evidence, verdict.by)
        with self.db.write() as cursor:
            cursor.execute(SQL["amend"], (worker_id, msgspec.json.encode(verdict).decode()))
            return bool(cursor.connection.changes())

    def settle(
        self, worker_id: str, endings: Sequence[Ending], releases: Sequence[Release], guard: Guard
    ) -> set[tuple[int, int]]:
        if not endings and not releases:
            return set()
        with self.db.write() as cursor:
            if not _holds(cursor, worker_id, guard):
                return set()
            tied: list[Ended] = []
            written = write_endings(cursor, worker_id, endings, tied) | write_releases(
                cursor, worker_id, releases, tied
            )
            woken = settled(cursor, tied)
        self.ring_queues(woken)
        return written

    def overdue(self, limit: int) -> list[HeldJob]:
        found = []
        with self.db.read() as cursor:
            clock = read_clock(cursor)
            for row in cursor.execute(SQL["held_by_anyone"]):
                job, worker_state = held_job(row, clock), row[18]
                if job.timeout_s is None or job.state is not JobState.RUNNING:
                    continue
                well = worker_state in (WorkerState.ACTIVE, WorkerState.DRAINING)
                if job.running_s > job.timeout_s + (OVERDUE_GRACE_S if well else OVERDUE_LOST_GRACE_S):
                    found.append(job)
        return found[:limit]

    def stale(self, older_than_s: float) -> list[HeldJob]:
        with self.db.read() as cursor:
            clock = read_clock(cursor)
            jobs = [(held_job(row, clock), row[18]) for row in cursor.execute(SQL["held_by_anyone"])]
        return [job for job, state in jobs if state not in LIVING or job.silent_s >= older_than_s]


def _holds(cursor: apsw.Cursor, worker_id: str, guard: Guard) -> bool:
    """Look at the evidence again, under the write lock: from here to the commit nobody can beat."""
    found = cursor.execute(SQL["worker_evidence"], (worker_id,)).fetchone()
    state, boot_id, beat_boot_s, beat_at = found or (None, None, None, None)
    match guard:
        case GuardNone():
            return True
        case GuardDead():
            # A missing row means dead: beats never insert one.
            return state not in LIVING
        case GuardSuspect():
            return state == WorkerState.SUSPECT
        case GuardSilent():
            return read_clock(cursor).silent_s(boot_id, beat_boot_s, beat_at) >= guard.silent_s
        case _:
            assert_never(guard)
