"""What people look at: jobs and their attempts, workers, queues, tasks, events."""

from collections.abc import Collection
from typing import Protocol

from unstuck.domain.cursor import Cursor
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


class ReadingVerbs(Protocol):
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

    def deferred_outcome(self, job_id: int) -> DeferredRecord | None:
        """Return since when the outcome of the present attempt of a job waits for a lock; None if it does not."""
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

    def newest_cursor(self) -> Cursor:
        """Return the position behind all events that can be seen now."""
        ...

    def events_since(
        self, cursor: Cursor, *, job_id: int | None = None, worker_id: str | None = None, limit: int = 100
    ) -> EventPage:
        """Return the next events behind this position, whatever the order of their ids; of one job or of one worker,
        if one is given."""
        ...

    def outputs(self, job_id: int) -> list[OutputRecord]: ...

    def workers(self, living_only: bool = False) -> list[WorkerRecord]: ...

    def queues(self) -> list[QueueRecord]:
        """Every queue that has unfinished jobs, a living worker, a known task, or a pause."""
        ...

    def tasks(self) -> list[TaskRecord]: ...
