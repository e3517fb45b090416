"""What all open pages share: one look at the ledger per second, recent events, the doctor in the background."""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from unstuck.client.doctor.findings import Finding
from unstuck.client.metrics import Minute
from unstuck.domain.event_cursor import Cursor
from unstuck.domain.states import HELD_STATES, JobState
from unstuck.errors import ErrorCode, UnstuckError
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.events import EventRecord
from unstuck.ledger.contract.jobs import JobFilter, JobRecord, Progress
from unstuck.ledger.contract.queues import QueueRecord
from unstuck.ledger.contract.workers import WorkerRecord
from unstuck.logs import logger

T = TypeVar("T")

FREE_S = 0.05
"""What takes no longer may be asked each time."""
RESTS_FOR = 10.0
"""So many times as long as the answer took beyond that: a tenth of somebody's time, or little more."""
LONGEST_REST_S = 15.0


class SelfThrottled(Generic[T]):
    """Keeps an answer for as long as it was dear: to count a million jobs takes a moment."""

    def __init__(self, ask: Callable[[], T], clock: Callable[[], float] = time.monotonic) -> None:
        self._ask = ask
        self._clock = clock
        self._kept: T | None = None
        self._until_s = float("-inf")

    def get(self) -> T:
        began_s = self._clock()
        if self._kept is None or began_s >= self._until_s:
            self._kept = self._ask()
            ended_s = self._clock()
            rest_s = RESTS_FOR * (ended_s - began_s - FREE_S)
            self._until_s = ended_s + min(max(0.0, rest_s), LONGEST_REST_S)
        return self._kept

    def forget(self) -> None:
        self._kept = None


KEPT_S = 3600.0
MAX_KEPT = 3_000
MAX_NAMED = 300
NAMED_PER_LOOK = 50


class RecentEvents:
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
        page = None if cursor is None else ledger.events.since(cursor, limit=MAX_KEPT)
        if cursor is None or page is None or not page.is_known or len(page.events) >= MAX_KEPT:
            # The first look, or more happened than is kept, or what was read is not what the ledger has now.
            if cursor is not None and page is not None and page.contradicts(cursor):
                self._events.clear()
            self._cursor = ledger.events.newest_cursor()
            fresh = ledger.events.list(limit=MAX_KEPT)
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
            found = ledger.jobs.get(job_id)
            self._tasks[job_id] = "" if found is None else found.task
        self._tasks = {job_id: self._tasks[job_id] for job_id in named if job_id in self._tasks}
        return dict(self._tasks)


MAX_AGE_S = 0.9
MAX_HELD = 2_000
COUNT_EVERY_S = 5.0
MAX_QUARANTINED = 100
# With their code they are found by an index, however many jobs failed.
QUARANTINED = JobFilter(states=(JobState.QUARANTINED,), error=ErrorCode.CRASHED_TOO_OFTEN.value, limit=MAX_QUARANTINED)

log = logger("unstuck.http")


@dataclass(frozen=True)
class Snapshot:
    at: float
    workers: tuple[WorkerRecord, ...]
    queues: tuple[QueueRecord, ...]
    held: tuple[JobRecord, ...]
    progress: dict[int, Progress]
    events: tuple[EventRecord, ...]
    """Of the last hour, oldest first; the newest few thousand."""
    quarantined: int
    """Counted up to `MAX_QUARANTINED`."""
    tasks_of: dict[int, str]
    """Names of the tasks of jobs that recent events speak of."""
    minutes: tuple[Minute, ...]
    """What was counted in the last hour."""
    findings: tuple[Finding, ...] | None
    """What the doctor found last; None while nobody has asked yet."""
    examined_at: float | None

    def held_jobs(self, worker_id: str) -> list[JobRecord]:
        return [job for job in self.held if job.worker_id == worker_id]


class SnapshotCache:
    """Looks at the ledger at most once a second, however many ask."""

    def __init__(
        self,
        ledger: Callable[[], Ledger],
        activity: Callable[[], list[Minute]],
        doctor: Callable[[], tuple[Finding, ...]],
    ) -> None:
        self._ledger = ledger
        self._activity = activity
        self._minutes: tuple[Minute, ...] = ()
        self._counted_s = 0.0
        self._workers = SelfThrottled(lambda: tuple(ledger().workers.list()))
        self._queues = SelfThrottled(lambda: tuple(ledger().queues.list()))
        self._logbook = RecentEvents()
        self._checkup = DoctorCache(doctor)
        self._lock = threading.Lock()
        self._seen: Snapshot | None = None
        self._seen_s = 0.0

    def snapshot(self, max_age_s: float = MAX_AGE_S) -> Snapshot:
        with self._lock:
            if self._seen is None or time.monotonic() - self._seen_s > max_age_s:
                self._seen = self._look()
                self._seen_s = time.monotonic()
            return self._seen

    def forget(self) -> None:
        """Look anew next time: somebody has just changed something."""
        with self._lock:
            self._seen = None
            self._workers.forget()
            self._queues.forget()

    def examine(self) -> None:
        """Ask the doctor if the last visit was long ago; does not wait for the answer."""
        self._checkup.ask()

    def _look(self) -> Snapshot:
        ledger = self._ledger()
        held = tuple(ledger.jobs.list(JobFilter(states=tuple(HELD_STATES), limit=MAX_HELD)))
        quarantined = ledger.jobs.list(QUARANTINED)
        before = self._logbook.events[-1:]
        self._logbook.read(ledger)
        if self._logbook.events[-1:] != before:
            # Somebody died, perhaps: that is shown at once, whatever it takes.
            self._workers.forget()
        findings, examined_at = self._checkup.found
        # Minutes change slowly, and counting them is the dearest of these questions.
        if not self._minutes or time.monotonic() - self._counted_s > COUNT_EVERY_S:
            self._minutes = tuple(self._activity())
            self._counted_s = time.monotonic()
        return Snapshot(
            at=time.time(),
            workers=self._workers.get(),
            queues=self._queues.get(),
            held=held,
            progress=ledger.jobs.progress([job.id for job in held]) if held else {},
            events=self._logbook.events,
            quarantined=len(quarantined),
            tasks_of=self._logbook.tasks_of(ledger, held),
            minutes=self._minutes,
            findings=findings,
            examined_at=examined_at,
        )


class DoctorCache:
    """Visits the doctor now and then, in a thread of its own: a visit may take seconds."""

    EVERY_S = 10.0

    def __init__(self, doctor: Callable[[], tuple[Finding, ...]]) -> None:
        self._doctor = doctor
        self._lock = threading.Lock()
        self._asked_s: float | None = None
        self._busy = False
        self.found: tuple[tuple[Finding, ...] | None, float | None] = (None, None)

    def ask(self) -> None:
        with self._lock:
            recently = self._asked_s is not None and time.monotonic() - self._asked_s < self.EVERY_S
            if self._busy or recently:
                return
            self._busy, self._asked_s = True, time.monotonic()
        threading.Thread(target=self._visit, name="unstuck-doctor", daemon=True).start()

    def _visit(self) -> None:
        try:
            self.found = (self._doctor(), time.time())
        except UnstuckError as error:
            # Without a ledger there is nothing to examine, and the page itself says so.
            log.debug("The doctor could not be asked", error=str(error))
        finally:
            with self._lock:
                self._busy = False
                self._asked_s = time.monotonic()
