"""Keep the events of the last hour, and read only what is new."""

import time
from collections.abc import Iterable

from unstuck.domain.cursor import Cursor
from unstuck.store.contract import Ledger
from unstuck.store.records import EventRecord, JobRecord

KEPT_S = 3600.0
MAX_KEPT = 3_000
MAX_NAMED = 300
NAMED_PER_LOOK = 50


class Logbook:
    """Used under the lock of its owner."""

    def __init__(self) -> None:
        self._events: dict[int, EventRecord] = {}
        self._cursor: Cursor | None = None
        self._tasks: dict[int, str] = {}

    @property
    def events(self) -> tuple[EventRecord, ...]:
        return tuple(self._events[event_id] for event_id in sorted(self._events))

    def read(self, ledger: Ledger) -> None:
        cursor = self._cursor
        page = None if cursor is None else ledger.events_since(cursor, limit=MAX_KEPT)
        if cursor is None or page is None or not page.is_known or len(page.events) >= MAX_KEPT:
            # The first look, or more happened than is kept, or what was read is not what the ledger has now.
            if cursor is not None and page is not None and page.contradicts(cursor):
                self._events.clear()
            self._cursor = ledger.newest_cursor()
            fresh = ledger.events(limit=MAX_KEPT)
        else:
            for event in page.events:
                cursor = cursor.after(event.transaction, event.id, event.at, page.running)
            self._cursor = cursor.settled(page.running)
            fresh = page.events
        self._events |= {event.id: event for event in fresh}
        since = time.time() - KEPT_S
        kept = sorted(event_id for event_id, event in self._events.items() if event.at >= since)[-MAX_KEPT:]
        self._events = {event_id: self._events[event_id] for event_id in kept}

    def tasks_of(self, ledger: Ledger, known: Iterable[JobRecord]) -> dict[int, str]:
        """Name the tasks of the jobs that the newest events speak of; a few at a time, since each is a question."""
        for job in known:
            self._tasks[job.id] = job.task
        wanted = dict.fromkeys(event.job_id for event in reversed(self.events) if event.job_id is not None)
        named = list(wanted)[:MAX_NAMED]
        for job_id in [job_id for job_id in named if job_id not in self._tasks][:NAMED_PER_LOOK]:
            found = ledger.job(job_id)
            self._tasks[job_id] = "" if found is None else found.task
        self._tasks = {job_id: self._tasks[job_id] for job_id in named if job_id in self._tasks}
        return dict(self._tasks)
