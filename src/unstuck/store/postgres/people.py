"""Answer people's questions; nothing here changes anything."""

from collections.abc import Collection

from unstuck.domain.cursor import Cursor
from unstuck.domain.states import HELD, WRONG, JobState
from unstuck.store.manners import politely
from unstuck.store.postgres import arrays
from unstuck.store.postgres.base import Verbs
from unstuck.store.postgres.cursors import cursor_values, newest_cursor_of
from unstuck.store.postgres.rows import attempt_record, job_record, worker_record
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


class ReadingVerbs(Verbs):
    def job(self, job_id: int) -> JobRecord | None:
        rows = self.read("job", job_id=job_id)
        return job_record(rows[0]) if rows else None

    def jobs(self, where: JobFilter) -> list[JobRecord]:
        rows = self.read(
            "jobs",
            before_id=where.before_id,
            from_id=where.from_id,
            states=arrays.texts(where.states) if where.states else None,
            held=bool(where.states) and HELD.issuperset(where.states),
            pending=set(where.states) == {JobState.PENDING},
            wrong=bool(where.states) and WRONG.issuperset(where.states),
            queue=where.queue,
            task=where.task,
            error=where.error,
            worker_id=where.worker_id,
            older_than_s=where.older_than_s,
            newer_than_s=where.newer_than_s,
            limit=where.limit,
        )
        return [job_record(row, is_whole=False) for row in rows]

    def count_jobs(self) -> dict[str, int]:
        return dict(self.read("count_jobs"))

    def attempts(self, job_id: int) -> list[AttemptRecord]:
        return [attempt_record(row) for row in self.read("attempts", job_id=job_id)]

    def deferred_outcome(self, job_id: int) -> DeferredRecord | None:
        rows = self.read("deferred_outcome", job_id=job_id)
        return DeferredRecord(*rows[0]) if rows else None

    def progress(self, job_ids: Collection[int]) -> dict[int, Progress]:
        rows = self.read("progress", ids=arrays.int8s(list(job_ids)))
        return {row[0]: Progress(*row) for row in rows}

    def events(
        self,
        *,
        job_id: int | None = None,
        worker_id: str | None = None,
        after_id: int | None = None,
        limit: int = 100,
    ) -> list[EventRecord]:
        if after_id is None:
            rows = self.read("last_events", job_id=job_id, worker_id=worker_id, limit=limit)[::-1]
        else:
            rows = self.read("events_after", job_id=job_id, worker_id=worker_id, after_id=after_id, limit=limit)
        return [EventRecord(*row) for row in rows]

    def newest_cursor(self) -> Cursor:
        return newest_cursor_of(*self.read("newest_event")[0])

    def events_since(
        self, cursor: Cursor, *, job_id: int | None = None, worker_id: str | None = None, limit: int = 100
    ) -> EventPage:
        values = cursor_values(cursor)
        if job_id is None:
            rows = self.read("events_since", worker_id=worker_id, limit=limit, **values)
        else:
            rows = self.read("events_of_job_since", job_id=job_id, limit=limit, **values)
        running, origin, origin_at, oldest_id = rows[0][:4]
        return EventPage(
            [EventRecord(*row[4:]) for row in rows if row[4] is not None],
            frozenset(running),
            cursor.names(origin, origin_at),
            oldest_id,
        )

    def outputs(self, job_id: int) -> list[OutputRecord]:
        return [OutputRecord(*row) for row in self.read("outputs", job_id=job_id)]

    def workers(self, living_only: bool = False) -> list[WorkerRecord]:
        return [worker_record(row) for row in politely(self.read("workers", living_only=living_only))]

    def queues(self) -> list[QueueRecord]:
        return [QueueRecord(*(*row[:6], row[6] if row[10] else None, *row[7:10])) for row in self.read("queues")]

    def tasks(self) -> list[TaskRecord]:
        return [TaskRecord(*row) for row in self.read("tasks")]
