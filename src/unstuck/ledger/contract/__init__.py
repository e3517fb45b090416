"""`Ledger`: the interface that both databases implement, with its records by subject."""

from collections.abc import Collection, Sequence
from typing import Any, Protocol

from unstuck.domain.event_cursor import Cursor
from unstuck.ledger.contract.admin import AccessVerbs, CountingVerbs
from unstuck.ledger.contract.diagnosis import Blocker, Diagnosis
from unstuck.ledger.contract.events import AlertVerbs, EventPage, EventRecord, TellingVerbs
from unstuck.ledger.contract.jobs import (
    AttemptRecord,
    ClientVerbs,
    JobFilter,
    JobRecord,
    JournalVerbs,
    OperatorVerbs,
    OutputRecord,
    TaskRecord,
)
from unstuck.ledger.contract.maintenance import UpkeepVerbs
from unstuck.ledger.contract.queues import OrderVerbs, QueueRecord
from unstuck.ledger.contract.recovery import ReaperVerbs
from unstuck.ledger.contract.schedules import ScheduleVerbs
from unstuck.ledger.contract.workers import (
    DeferredRecord,
    ExchangeVerbs,
    ForeignVerbs,
    HealthVerbs,
    Progress,
    WorkerRecord,
    WorkerVerbs,
)
from unstuck.ledger.contract.workers import Listener as Listener
from unstuck.ledger.contract.workers import PipelinedHeartbeats as PipelinedHeartbeats
from unstuck.ledger.contract.workflows import WorkflowVerbs
from unstuck.ledger.migrate import WAIT_S, Migration


class KeepingVerbs(Protocol):
    single_host: bool
    """Everybody who uses it shares one machine, and one boot of it: true of a file, not of a server."""

    def migrate(self, *, wait_s: float = WAIT_S, migrations: Sequence[Migration] | None = None) -> list[str]:
        """Bring the tables up to date and return the names of what was applied.

        Under a lock, safe to run twice at once, each file in a transaction of its own. Locks of others are waited
        for in short tries, for `wait_s` in all; then MigrationBlocked. SchemaMismatch if the tables no longer work
        with this code. `migrations` are those of this version unless said."""
        ...

    def check_schema(self) -> None:
        """Raise SchemaMismatch, naming the cure, unless this code works with the tables."""
        ...

    def ledger_id(self) -> str:
        """Return which ledger this is: a text that was drawn when its tables were made. From its first use on a ledger
        object raises LedgerReplaced whenever it finds another one in its place, or none."""
        ...

    def expect(self, ledger_id: str) -> None:
        """Take no other ledger than this one."""
        ...

    def void_tokens(self) -> int:
        """After a restore from a backup: every living worker is dead, every token is void, what was held
        goes back to the queue (claimed) or waits for the next sweep (running). Gives the number of workers."""
        ...

    def describe(self) -> dict[str, Any]:
        """Say what this ledger is, for people: database, version, schema, pooler, bell."""
        ...

    def diagnose(self, *, far_s: float, late_s: float) -> Diagnosis:
        """Look at the ledger's own health, in bounded looks; really rings the bell where there is one.

        `scheduled` are jobs due in more than `far_s`, `overdue` those that have been due for `late_s`."""
        ...

    def blockers(self, *, open_s: float) -> tuple[Blocker, ...]:
        """Return the transactions that hold locks of the ledger and have been open for longer than `open_s`.

        Needs none of the ledger's own tables, so it answers even if one of them is locked. Looks for a second or two if
        it finds any, to see what waits for them."""
        ...

    def close(self) -> None: ...


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


class Ledger(
    KeepingVerbs,
    ClientVerbs,
    WorkerVerbs,
    ForeignVerbs,
    ExchangeVerbs,
    ReaperVerbs,
    UpkeepVerbs,
    HealthVerbs,
    TellingVerbs,
    CountingVerbs,
    ReadingVerbs,
    OperatorVerbs,
    OrderVerbs,
    AccessVerbs,
    AlertVerbs,
    JournalVerbs,
    ScheduleVerbs,
    WorkflowVerbs,
    Protocol,
):
    """All of it; each part stands in the file that is named for it."""
