"""Read jobs on SQLite, cancel, retry and purge them."""

import heapq
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

import apsw
import msgspec

from unstuck.domain.event_cursor import Cursor, stamp_of
from unstuck.domain.states import HELD_STATES, UNSUCCESSFUL_STATES, AttemptState, JobState
from unstuck.ledger.checks import check_ids
from unstuck.ledger.contract.events import EventPage, EventRecord
from unstuck.ledger.contract.jobs import AttemptRecord, JobFilter, JobRecord, OutputRecord, TaskRecord
from unstuck.ledger.contract.queues import QueueRecord
from unstuck.ledger.contract.workers import DeferredRecord, Progress, WorkerRecord
from unstuck.ledger.sqlite.clock import read_clock
from unstuck.ledger.sqlite.database import SQL, Database, Verbs, fetch, write_event
from unstuck.ledger.sqlite.endings import Ended, after_end, linked_among, requeue
from unstuck.ledger.sqlite.errors import refuse_nul
from unstuck.ledger.sqlite.rows import Row, attempt_record, job_record, worker_record
from unstuck.ledger.sqlite.workflows import may_reopen, reopen

NO_ID = 2**63 - 1
MANY = 5_000
"""From so many pending jobs on, the newest jobs are read one by one: among them are pending ones soon enough."""


def list_jobs(db: Database, where: JobFilter) -> list[JobRecord]:
    with db.read() as cursor:
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


PURGE_BATCH = 2_000
PURGE_LOOK = 100_000
"""How many ids of jobs to cancel are looked up at once."""
STEP_JOBS = 1_000

_ENDED_BADLY = (JobState.FAILED, JobState.CANCELLED, JobState.QUARANTINED)

Act = Callable[[apsw.Cursor, int, str, list[Ended]], str]
"""Do it to one job; what others are to be told of goes to the list."""


class OperatorVerbs(Verbs):
    def pause(self, queue: str | None, by: str) -> list[str]:
        return self._set_paused(queue, True, by)

    def resume(self, queue: str | None, by: str) -> list[str]:
        return self._set_paused(queue, False, by)

    def _set_paused(self, queue: str | None, paused: bool, by: str) -> list[str]:
        refuse_nul(queue, by)
        changed = []
        with self.db.write() as cursor:
            known = {name: bool(value) for name, value in cursor.execute(SQL["queue_names"])}
            for name in sorted(known) if queue is None else [queue]:
                if known.get(name, False) is paused:
                    continue
                cursor.execute(SQL["set_paused"], (name, paused, time.time(), by))
                word = "paused" if paused else "resumed"
                write_event(cursor, f"queue_{word}", f"Queue '{name}' was {word} by {by}")
                changed.append(name)
        return changed

    def request(self, worker_id: str, what: str, by: str) -> bool:
        refuse_nul(worker_id, by)
        with self.db.write() as cursor:
            cursor.execute(SQL["request"], (worker_id, what))
            if not cursor.connection.changes():
                return False
            write_event(cursor, f"worker_asked_to_{what}", f"Asked to {what} by {by}", worker_id=worker_id)
        return True

    def cancel(self, job_ids: Collection[int], by: str) -> dict[int, str]:
        return self._in_steps(_cancel, job_ids, by)

    def cancel_untaken(self, job_ids: Collection[int], waited_s: float, by: str) -> list[int]:
        before_s = time.time() - waited_s
        with self.db.read() as cursor:
            untaken = [job_id for job_id in job_ids if _is_untaken(cursor, job_id, before_s)]

        def cancel(cursor: apsw.Cursor, job_id: int, by: str, tied: list[Ended]) -> str:
            # Again, under the lock: a worker may have taken it in between.
            return _cancel(cursor, job_id, by, tied) if _is_untaken(cursor, job_id, before_s) else "taken"

        answers = self._in_steps(cancel, untaken, by) if untaken else {}
        return [job_id for job_id, answer in answers.items() if answer == "cancelled"]

    def retry(self, job_ids: Collection[int], by: str) -> dict[int, str]:
        return self._in_steps(_retry, job_ids, by)

    def purge(self, queue: str, by: str) -> int:
        refuse_nul(queue, by)
        count = 0
        cause = f"queue '{queue}' was purged by {by}"
        # Until a walk finds nothing more to cancel: jobs may have become ready meanwhile.
        while cancelled := self._purge_once(queue, cause):
            count += cancelled
        if count:
            with self.db.write() as cursor:
                write_event(cursor, "purged", f"{count} pending jobs of queue '{queue}' were cancelled by {by}")
        return count

    def _purge_once(self, queue: str, cause: str) -> int:
        """Walk through the jobs of a queue once, and cancel those that have not begun."""
        count, after = 0, 0
        while True:
            with self.db.read() as cursor:
                ids = [job_id for (job_id,) in fetch(cursor, "to_purge", (queue, after, PURGE_LOOK))]
            if not ids:
                return count
            after = ids[-1]
            # In short transactions: purging a million jobs must not make the workers of others wait.
            for start in range(0, len(ids), PURGE_BATCH):
                with self.db.write() as cursor:
                    count += _purge(cursor, ids[start : start + PURGE_BATCH], cause)

    def _in_steps(self, act: Act, job_ids: Collection[int], by: str) -> dict[int, str]:
        """In short transactions: nobody should wait for an operator with a long list."""
        refuse_nul(by)
        check_ids(job_ids)
        ids = list(dict.fromkeys(job_ids))
        answers: dict[int, str] = {}
        for start in range(0, len(ids), STEP_JOBS):
            tied: list[Ended] = []
            with self.db.write() as cursor:
                answers.update({job_id: act(cursor, job_id, by, tied) for job_id in ids[start : start + STEP_JOBS]})
                # Once for all: of a workflow and its nodes the end of one must not decide for the others.
                after_end(cursor, tied)
        return answers


def _purge(cursor: apsw.Cursor, ids: list[int], cause: str) -> int:
    """Cancel those of these jobs that still wait and have not begun; give how many.

    A pending node of a workflow that has begun is spared: without it the work that is done would be lost."""
    found = fetch(cursor, "still_to_purge", (msgspec.json.encode(ids).decode(),))
    flows = msgspec.json.encode(list({flow for _, flow in found if flow is not None})).decode()
    begun = {flow for (flow,) in fetch(cursor, "begun_workflows", (flows,))}
    chosen = [job_id for job_id, flow in found if flow not in begun]
    cursor.executemany(SQL["cancel_idle_job"], [(job_id, time.time(), cause) for job_id in chosen])
    after_end(cursor, [(job_id, AttemptState.CANCELLED) for job_id in linked_among(cursor, chosen)])
    return len(chosen)


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


class ReadingVerbs(Verbs):
    def job(self, job_id: int) -> JobRecord | None:
        with self.db.read() as cursor:
            row = cursor.execute(SQL["job"], (job_id,)).fetchone()
        return None if row is None else job_record(row)

    def jobs(self, where: JobFilter) -> list[JobRecord]:
        return list_jobs(self.db, where)

    def count_jobs(self) -> dict[str, int]:
        with self.db.read() as cursor:
            found = dict(fetch(cursor, "count_jobs"))
        return {state.value: found[state.value] for state in JobState if state.value in found}

    def attempts(self, job_id: int) -> list[AttemptRecord]:
        with self.db.read() as cursor:
            return [attempt_record(row) for row in fetch(cursor, "attempts", (job_id,))]

    def deferred_outcome(self, job_id: int) -> DeferredRecord | None:
        with self.db.read() as cursor:
            rows = fetch(cursor, "deferred_outcome", (job_id, time.time()))
        return DeferredRecord(rows[0][0], bool(rows[0][1]), *rows[0][2:]) if rows else None

    def progress(self, job_ids: Collection[int]) -> dict[int, Progress]:
        with self.db.read() as cursor:
            rows = fetch(cursor, "progress", (msgspec.json.encode(list(job_ids)).decode(),))
        return {row[0]: Progress(*row) for row in rows}

    def events(
        self,
        *,
        job_id: int | None = None,
        worker_id: str | None = None,
        after_id: int | None = None,
        limit: int = 100,
    ) -> list[EventRecord]:
        whose: tuple[int | str, ...] = ()
        suffix = ""
        if job_id is not None:
            whose, suffix = (job_id,), "_of_job"
        elif worker_id is not None:
            whose, suffix = (worker_id,), "_of_worker"
        with self.db.read() as cursor:
            if after_id is not None:
                rows = fetch(cursor, f"events{suffix or '_after'}", (*whose, after_id, limit))
            else:
                rows = fetch(cursor, f"last_events{suffix}", (*whose, limit))[::-1]
        records = [_event_record(row) for row in rows]
        both = job_id is not None and worker_id is not None
        return [event for event in records if event.worker_id == worker_id] if both else records

    def newest_cursor(self) -> Cursor:
        with self.db.read() as cursor:
            rows = fetch(cursor, "last_events", (1,))
        return Cursor(rows[0][0], rows[0][0], stamp_of(rows[0][1])) if rows else Cursor()

    def events_since(
        self, cursor: Cursor, *, job_id: int | None = None, worker_id: str | None = None, limit: int = 100
    ) -> EventPage:
        records = self.events(job_id=job_id, worker_id=worker_id, after_id=cursor.floor[0], limit=limit)
        # After the events: if retention comes in between, a gap is reported where none is, and never the other way.
        with self.db.read() as reading:
            origin = fetch(reading, "event_time", (cursor.id,))
            [(oldest_id,)] = fetch(reading, "oldest_event")
        is_known = cursor.names(cursor.id, origin[0][0] if origin else None)
        return EventPage(records, frozenset(), is_known, oldest_id)

    def outputs(self, job_id: int) -> list[OutputRecord]:
        with self.db.read() as cursor:
            return [OutputRecord(*row) for row in fetch(cursor, "outputs", (job_id,))]

    def workers(self, living_only: bool = False) -> list[WorkerRecord]:
        with self.db.read() as cursor:
            clock = read_clock(cursor)
            return [worker_record(row, clock) for row in cursor.execute(SQL["workers"], (living_only,))]

    def queues(self) -> list[QueueRecord]:
        now = time.time()
        with self.db.read() as cursor:
            paused = {name: bool(is_paused) for name, is_paused in fetch(cursor, "queue_names")}
            ready = {queue: (count, oldest) for queue, count, oldest in fetch(cursor, "count_ready")}
            waiting = dict(fetch(cursor, "count_waiting"))
            suspended = {queue: (count, timed) for queue, count, timed in fetch(cursor, "count_suspended")}
            blocked = dict(fetch(cursor, "count_blocked_by_queue"))
            held = {(queue, state): count for queue, state, count in fetch(cursor, "count_held")}
            served = dict(fetch(cursor, "queues_served"))
            tasks = {row[1] for row in fetch(cursor, "tasks")}
            since = {queue: cursor.execute(SQL["run_at_of"], (oldest,)).get for queue, (_, oldest) in ready.items()}
        names = {name for name, is_paused in paused.items() if is_paused}
        names |= {*ready, *waiting, *suspended, *blocked, *(queue for queue, _ in held), *served, *tasks}
        return [
            QueueRecord(
                name=name,
                paused=paused.get(name, False),
                pending=ready[name][0] if name in ready else 0,
                scheduled=waiting.get(name, 0) - suspended.get(name, (0, 0))[1],
                claimed=held.get((name, "claimed"), 0),
                running=held.get((name, "running"), 0),
                oldest_pending_s=max(now - since[name], 0.0) if since.get(name) is not None else None,
                workers=served.get(name, 0),
                waiting=suspended.get(name, (0, 0))[0],
                blocked=blocked.get(name, 0),
            )
            for name in sorted(names)
        ]

    def tasks(self) -> list[TaskRecord]:
        with self.db.read() as cursor:
            return [
                TaskRecord(name, queue, policy, bool(is_async))
                for name, queue, policy, is_async in fetch(cursor, "tasks")
            ]


def _event_record(row: Row) -> EventRecord:
    # Writes are serial: the order of ids is the order of commits.
    return EventRecord(*(*row, row[0]))
