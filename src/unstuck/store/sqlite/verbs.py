"""Hold what every group of verbs needs: the file, the queries, and a way to write an event."""

import time
from collections.abc import Iterable, Sequence
from typing import Any

import apsw

from unstuck.config import Settings
from unstuck.store.gaps import Gaps
from unstuck.store.sql import load_queries
from unstuck.store.sqlite.bell import Ringer
from unstuck.store.sqlite.database import Database

SQL = load_queries(
    "unstuck.store.sqlite.queries",
    "jobs.sql",
    "workers.sql",
    "upkeep.sql",
    "people.sql",
    "health.sql",
    "diagnosis.sql",
    "telling.sql",
    "requests.sql",
    "foreign.sql",
    "api_tokens.sql",
    "audit.sql",
    "counters.sql",
    "alerts.sql",
    "letters.sql",
    "journal.sql",
    "lines.sql",
    "schedules.sql",
    "workflows.sql",
)


class Verbs:
    """The ground that client, worker, reaper and operator verbs stand on."""

    settings: Settings
    db: Database
    gaps: Gaps
    ringer: Ringer

    def ring_queues(self, queues: Iterable[str]) -> None:
        """Wake who serves these queues, after the commit that made jobs ready there."""
        if words := [f"queue:{queue}" for queue in queues]:
            self.ringer.ring(words)


def fetch(cursor: apsw.Cursor, query: str, values: Sequence[Any] = ()) -> list[Any]:
    """Run a named query and give all of its rows."""
    return cursor.execute(SQL[query], values).fetchall()


def write_event(
    cursor: apsw.Cursor,
    kind: str,
    message: str,
    *,
    job_id: int | None = None,
    worker_id: str | None = None,
    about: str | None = None,
) -> None:
    cursor.execute(SQL["insert_event"], (time.time(), kind, job_id, worker_id, about, message))
