"""What everybody who looks at the page sees: one look at the ledger, shared by all viewers."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from unstuck.client.activity import Minute
from unstuck.client.doctor.finding import Finding
from unstuck.domain.errors import ErrorCode, UnstuckError
from unstuck.domain.states import HELD, JobState
from unstuck.http.page.logbook import Logbook
from unstuck.http.page.pacing import Paced
from unstuck.logs import logger
from unstuck.store.contract import Ledger
from unstuck.store.records import EventRecord, JobFilter, JobRecord, Progress, QueueRecord, WorkerRecord

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

    def held_by(self, worker_id: str) -> list[JobRecord]:
        return [job for job in self.held if job.worker_id == worker_id]


class Lookout:
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
        self._workers = Paced(lambda: tuple(ledger().workers()))
        self._queues = Paced(lambda: tuple(ledger().queues()))
        self._logbook = Logbook()
        self._checkup = Checkup(doctor)
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
        held = tuple(ledger.jobs(JobFilter(states=tuple(HELD), limit=MAX_HELD)))
        quarantined = ledger.jobs(QUARANTINED)
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
            progress=ledger.progress([job.id for job in held]) if held else {},
            events=self._logbook.events,
            quarantined=len(quarantined),
            tasks_of=self._logbook.tasks_of(ledger, held),
            minutes=self._minutes,
            findings=findings,
            examined_at=examined_at,
        )


class Checkup:
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
        threading.Thread(target=self._visit, name="page-doctor", daemon=True).start()

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
