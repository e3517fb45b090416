"""Jobs on SQLite: enqueue, read, cancel, retry, signal."""

import heapq
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import apsw
import msgspec

from unstuck import failpoints
from unstuck.domain.states import HELD_STATES, UNSUCCESSFUL_STATES, AttemptState, JobState
from unstuck.ledger.checks import check_ids, check_jobs
from unstuck.ledger.contract.jobs import (
    AttemptRecord,
    DeferredRecord,
    Enqueued,
    Fate,
    JobFilter,
    JobLinks,
    JobPosition,
    JobRecord,
    JournalRecord,
    NewJob,
    OnceAnswer,
    Outcome,
    OutputRecord,
    Progress,
    Request,
    SignalRecord,
    read_fate,
)
from unstuck.ledger.sqlite.database import SQL, Database, fetch, write_event
from unstuck.ledger.sqlite.endings import Ended, after_end, linked_among, requeue
from unstuck.ledger.sqlite.enqueue import SLOWEST_INSERT_S, insert_jobs, insert_once, part_of
from unstuck.ledger.sqlite.errors import refuse_nul
from unstuck.ledger.sqlite.journal import send_signal
from unstuck.ledger.sqlite.notifier import Notifier
from unstuck.ledger.sqlite.rows import attempt_record, job_record, outcome
from unstuck.ledger.sqlite.workflows import may_reopen, reopen

NO_ID = 2**63 - 1
MANY = 5_000
"""From so many pending jobs on, the newest jobs are read one by one: among them are pending ones soon enough."""


STEP_JOBS = 1_000

_ENDED_BADLY = (JobState.FAILED, JobState.CANCELLED, JobState.QUARANTINED)

Act = Callable[[apsw.Cursor, int, str, list[Ended]], str]
"""Do it to one job; what others are to be told of goes to the list."""


class Jobs:
    """See `unstuck.ledger.contract.jobs.Jobs`."""

    def __init__(self, db: Database, wakeups: Notifier) -> None:
        self._db = db
        self._wakeups = wakeups

    def enqueue(self, jobs: Sequence[NewJob], patience_s: float | None = None) -> list[Enqueued]:
        # There is one lock for the whole file, and `busy_timeout` says how long everybody waits for it.
        if not jobs:
            return []
        check_jobs(jobs)
        # A million jobs are one transaction, and whoever writes them is slow but not frozen.
        with self._db.write(limit_s=len(jobs) * SLOWEST_INSERT_S) as cursor:
            answer = insert_jobs(cursor, jobs)
            if failpoints.active:
                failpoints.reached("enqueue.before_commit")
        if failpoints.active:
            failpoints.reached("enqueue.after_commit")
        return answer

    def enqueue_once(self, request: Request, jobs: Sequence[NewJob]) -> OnceAnswer:
        check_jobs(jobs)
        with self._db.write() as cursor:
            return insert_once(cursor, request, jobs)

    def enqueue_on(self, connection: Any, jobs: Sequence[NewJob]) -> list[Enqueued]:
        with part_of(self._db, connection) as cursor:
            if not jobs:
                return []
            check_jobs(jobs)
            return insert_jobs(cursor, jobs)

    def outcomes(self, job_ids: Collection[int]) -> list[Outcome]:
        with self._db.read() as cursor:
            return [outcome(row) for row in cursor.execute(SQL["outcomes"], (_json(job_ids),))]

    def missing(self, job_ids: Collection[int]) -> set[int]:
        with self._db.read() as cursor:
            return {job_id for (job_id,) in cursor.execute(SQL["missing"], (_json(job_ids),))}

    def get(self, job_id: int) -> JobRecord | None:
        with self._db.read() as cursor:
            row = cursor.execute(SQL["job"], (job_id,)).fetchone()
        return None if row is None else job_record(row)

    def attempts(self, job_id: int) -> list[AttemptRecord]:
        with self._db.read() as cursor:
            return [attempt_record(row) for row in fetch(cursor, "attempts", (job_id,))]

    def progress(self, job_ids: Collection[int]) -> dict[int, Progress]:
        with self._db.read() as cursor:
            rows = fetch(cursor, "progress", (msgspec.json.encode(list(job_ids)).decode(),))
        return {row[0]: Progress(*row) for row in rows}

    def deferred_outcome(self, job_id: int) -> DeferredRecord | None:
        with self._db.read() as cursor:
            rows = fetch(cursor, "deferred_outcome", (job_id, time.time()))
        return DeferredRecord(rows[0][0], bool(rows[0][1]), *rows[0][2:]) if rows else None

    def outputs(self, job_id: int) -> list[OutputRecord]:
        with self._db.read() as cursor:
            return [OutputRecord(*row) for row in fetch(cursor, "outputs", (job_id,))]

    def links(self, job_id: int) -> JobLinks | None:
        with self._db.read() as cursor:
            row = cursor.execute(SQL["ties"], (job_id,)).fetchone()
        return None if row is None else JobLinks(*(*row[:2], bool(row[2]), *row[3:]))

    def positions(self, job_ids: Collection[int]) -> list[JobPosition]:
        if not job_ids:
            return []
        with self._db.read() as cursor:
            rows = fetch(cursor, "glance", (msgspec.json.encode(list(job_ids)).decode(),))
        return [JobPosition(row[0], JobState(row[1]), *row[2:]) for row in rows]

    def fates(self, attempts: Sequence[tuple[int, int]]) -> list[Fate]:
        with self._db.read() as cursor:
            return [read_fate(row) for row in fetch(cursor, "fates", (msgspec.json.encode(attempts).decode(),))]

    def count(self) -> dict[str, int]:
        with self._db.read() as cursor:
            found = dict(fetch(cursor, "count_jobs"))
        return {state.value: found[state.value] for state in JobState if state.value in found}

    def cancel(self, job_ids: Collection[int], by: str) -> dict[int, str]:
        return self._in_steps(_cancel, job_ids, by)

    def cancel_untaken(self, job_ids: Collection[int], waited_s: float, by: str) -> list[int]:
        before_s = time.time() - waited_s
        with self._db.read() as cursor:
            untaken = [job_id for job_id in job_ids if _is_untaken(cursor, job_id, before_s)]

        def cancel(cursor: apsw.Cursor, job_id: int, by: str, tied: list[Ended]) -> str:
            # Again, under the lock: a worker may have taken it in between.
            return _cancel(cursor, job_id, by, tied) if _is_untaken(cursor, job_id, before_s) else "taken"

        answers = self._in_steps(cancel, untaken, by) if untaken else {}
        return [job_id for job_id, answer in answers.items() if answer == "cancelled"]

    def retry(self, job_ids: Collection[int], by: str) -> dict[int, str]:
        return self._in_steps(_retry, job_ids, by)

    def signal(self, job_id: int, name: str, value: bytes, by: str) -> str:
        refuse_nul(name, by)
        check_ids((job_id,))
        with self._db.write() as cursor:
            answer, woken = send_signal(cursor, job_id, name, value, by)
        self._wakeups.notify_queues(woken)
        return answer

    def journal(self, job_id: int, within_bytes: int | None = None) -> list[JournalRecord]:
        check_ids((job_id,))
        with self._db.read() as cursor:
            if within_bytes is None:
                return [JournalRecord(*row) for row in cursor.execute(SQL["journal"], (job_id,))]
            return [JournalRecord(*row) for row in cursor.execute(SQL["journal_within"], (job_id, within_bytes))]

    def signals(self, job_id: int, within_bytes: int | None = None) -> list[SignalRecord]:
        check_ids((job_id,))
        with self._db.read() as cursor:
            if within_bytes is None:
                return [SignalRecord(*row) for row in cursor.execute(SQL["signals"], (job_id,))]
            return [SignalRecord(*row) for row in cursor.execute(SQL["signals_within"], (job_id, within_bytes))]

    def _in_steps(self, act: Act, job_ids: Collection[int], by: str) -> dict[int, str]:
        """In short transactions: nobody should wait for an operator with a long list."""
        refuse_nul(by)
        check_ids(job_ids)
        ids = list(dict.fromkeys(job_ids))
        answers: dict[int, str] = {}
        for start in range(0, len(ids), STEP_JOBS):
            tied: list[Ended] = []
            with self._db.write() as cursor:
                answers.update({job_id: act(cursor, job_id, by, tied) for job_id in ids[start : start + STEP_JOBS]})
                # Once for all: of a workflow and its nodes the end of one must not decide for the others.
                after_end(cursor, tied)
        return answers

    def list(self, where: JobFilter) -> list[JobRecord]:
        with self._db.read() as cursor:
            lists = [fetch(cursor, *way) for way in _ways(cursor, where)]
        newest = heapq.merge(*lists, key=lambda row: row[0], reverse=True)
        oldest = where.from_id or 0
        first = (row for row, _ in zip(newest, range(where.limit), strict=False) if row[0] >= oldest)
        return [job_record(row, is_whole=False) for row in first]


def _ways(cursor: Any, where: JobFilter) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Give queries with their values that find all of it together, and nothing twice."""
    states = frozenset(where.states)
    if where.error is not None:
        yield "jobs_with_error", (*_values(where, states), where.error)
        return
    if not states or JobState.SUCCEEDED in states:
        yield "jobs", (*_values(where, states), where.from_id or 0)
        return
    if held := states & HELD_STATES:
        yield "jobs_held", _values(where, held)
    if JobState.PENDING in states:
        pending = _values(where, frozenset({JobState.PENDING}))
        if cursor.execute(SQL["many_pending"], (MANY,)).get:
            yield "jobs", (*pending, where.from_id or 0)
        else:
            yield "jobs_ready", pending
            yield "jobs_waiting", pending
            yield "jobs_blocked", pending
    if JobState.WAITING in states:
        suspended = _values(where, frozenset({JobState.WAITING}))
        yield "jobs_waiting", suspended
        yield "jobs_awaiting", suspended
    if wrong := states & UNSUCCESSFUL_STATES:
        for (code,) in fetch(cursor, "error_codes"):
            yield "jobs_with_error", (*_values(where, wrong), code)


def _values(where: JobFilter, states: frozenset[JobState]) -> tuple[Any, ...]:
    now = time.time()
    return (
        NO_ID if where.before_id is None else where.before_id,
        msgspec.json.encode(sorted(states)).decode(),
        where.queue,
        where.task,
        where.worker_id,
        None if where.older_than_s is None else now - where.older_than_s,
        None if where.newer_than_s is None else now - where.newer_than_s,
        where.limit,
    )


def _is_untaken(cursor: apsw.Cursor, job_id: int, before_s: float) -> bool:
    return cursor.execute(SQL["is_untaken"], (job_id, before_s)).fetchone() is not None


def _cancel(cursor: apsw.Cursor, job_id: int, by: str, tied: list[Ended]) -> str:
    found = cursor.execute(SQL["job_brief"], (job_id,)).fetchone()
    if found is None:
        return "missing"
    state, worker_id = found[:2]
    if state in (JobState.PENDING, JobState.CLAIMED, JobState.WAITING):
        cursor.execute(SQL["cancel_idle_job"], (job_id, time.time(), f"cancelled by {by} before it ran"))
        if found[8]:
            tied.append((job_id, AttemptState.CANCELLED))
        write_event(cursor, "cancelled", f"Cancelled by {by} before it ran", job_id=job_id, worker_id=worker_id)
        return "cancelled"
    if state == JobState.RUNNING:
        cursor.execute(SQL["ask_cancel"], (job_id,))
        write_event(cursor, "cancel_requested", f"{by} asked to cancel it", job_id=job_id, worker_id=worker_id)
        return "requested"
    return "finished"


def _retry(cursor: apsw.Cursor, job_id: int, by: str, _tied: list[Ended]) -> str:
    found = cursor.execute(SQL["job_brief"], (job_id,)).fetchone()
    if found is not None and found[0] in _ENDED_BADLY and not may_reopen(cursor, job_id):
        return "duplicate"
    answer = requeue(cursor, job_id, by)
    if answer == "queued" and linked_among(cursor, [job_id]):
        reopen(cursor, job_id, by)
    return answer


def _json(job_ids: Collection[int]) -> str:
    check_ids(job_ids)
    return msgspec.json.encode(list(job_ids)).decode()
