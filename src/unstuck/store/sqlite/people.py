"""Answer people's questions; nothing here changes anything."""

import time
from collections.abc import Collection

import msgspec

from unstuck.domain.cursor import Cursor, stamp_of
from unstuck.domain.states import JobState
from unstuck.store.manners import politely
from unstuck.store.records import (
    AttemptRecord,
    DeferredRecord,
    EventPage,
    EventRecord,
    JobFilter,
    JobRecord,
    OutputRecord,
    Progress,
    QueueRecord,
    TaskRecord,
    WorkerRecord,
)
from unstuck.store.sqlite.listing import list_jobs
from unstuck.store.sqlite.rows import Row, attempt_record, job_record, worker_record
from unstuck.store.sqlite.silence import read_clock
from unstuck.store.sqlite.verbs import SQL, Verbs, fetch


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
            return [worker_record(row, clock) for row in politely(cursor.execute(SQL["workers"], (living_only,)))]

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
