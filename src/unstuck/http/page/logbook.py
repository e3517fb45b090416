"""Keep the events of the last hour, and read only what is new."""

import time
from collections.abc import Iterable

from unstuck.store.contract import Ledger
from unstuck.store.records import EventRecord, JobRecord

KEPT_S = 3600.0
MAX_KEPT = 3_000
OVERLAP = 200
"""Numbers are given before commits: an event may appear behind later ones. So the last few are read again."""
MAX_NAMED = 300
NAMED_PER_LOOK = 50


class Logbook:
    """Used under the lock of its owner."""

    def __init__(self) -> None:
        self._events: dict[int, EventRecord] = {}
        self._tasks: dict[int, str] = {}

    @property
    def events(self) -> tuple[EventRecord, ...]:
        return tuple(self._events[event_id] for event_id in sorted(self._events))

    def read(self, ledger: Ledger) -> None:
        fresh = ledger.events(limit=MAX_KEPT if not self._events else OVERLAP)
        if self._events and fresh and fresh[0].id > max(self._events):
            # More happened since the last look than a small look shows.
            fresh = ledger.events(limit=MAX_KEPT)
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
