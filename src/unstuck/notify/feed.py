"""The feed of events: one thread per process asks the ledger for everybody who listens.

It keeps the last few thousand events. A reader pulls what it has not seen, so a slow one holds up nobody; one that
falls too far behind is told of the gap and goes on with what is new.
"""

import threading
import time
from collections import deque
from collections.abc import Callable

from unstuck.domain.errors import UnstuckError
from unstuck.domain.events import Event
from unstuck.logs import logger
from unstuck.notify.cursor import Cursor
from unstuck.store.contract import Ledger
from unstuck.store.records import EventRecord

LOOK_S = 0.2
OUTAGE_LOOK_S = 1.0
PAGE = 500
KEPT = 10_000
HOLE_S = 30.0
"""A number that did not appear for so long belongs to a transaction that was rolled back: each is one round trip."""

log = logger("unstuck.notify")

Wake = Callable[[], None]


class Feed:
    def __init__(self, ledger: Callable[[], Ledger]) -> None:
        self._ledger = ledger
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._wakes: set[Wake] = set()
        self._events: deque[Event] = deque(maxlen=KEPT)
        self._taken = 0
        """How many events were ever taken in: the offset of the next one."""
        self._at: int | None = None
        self._holes: dict[int, float] = {}
        self._thread: threading.Thread | None = None

    # What readers call --------------------------------------------------------------------------

    def join(self, wake: Wake) -> tuple[int, Cursor]:
        """Be woken with everything new; give from where on to pull, and what was seen until then."""
        with self._lock:
            if self._thread is None:
                # Nobody listened: what happened meanwhile is no news.
                self._start_from(self._ledger().events(limit=PAGE))
                self._thread = threading.Thread(target=self._run, name="unstuck-events", daemon=True)
                self._thread.start()
            self._wakes.add(wake)
            return self._taken, self._cursor()

    def leave(self, wake: Wake) -> None:
        with self._lock:
            self._wakes.discard(wake)
            self._changed.notify_all()

    def nudge(self) -> None:
        """Wake everybody, news or not."""
        with self._lock:
            wakes = list(self._wakes)
        _wake_all(wakes)

    def pull(self, offset: int) -> tuple[list[Event], int, int]:
        """Give what came since `offset`, the next offset, and how many are kept no more and were passed over."""
        with self._lock:
            kept_from = self._taken - len(self._events)
            missed = max(0, kept_from - offset)
            start = max(offset, kept_from) - kept_from
            return [self._events[at] for at in range(start, len(self._events))], self._taken, missed

    # The thread ---------------------------------------------------------------------------------

    def _start_from(self, newest: list[EventRecord]) -> None:
        """Go on behind the newest events; what is missing among them may be about to be committed, and is news then."""
        self._at = newest[-1].id if newest else 0
        seen = {record.id for record in newest}
        among = range(max(newest[0].id, self._at - PAGE), self._at) if newest else ()
        self._holes = dict.fromkeys((number for number in among if number not in seen), time.monotonic())

    def _run(self) -> None:
        pause_s = LOOK_S
        while True:
            with self._lock:
                if not self._wakes:
                    self._thread = None
                    return
                self._changed.wait(pause_s)
            try:
                while self._look():
                    pass
                pause_s = LOOK_S
            except UnstuckError as error:
                if pause_s == LOOK_S:
                    log.warning("Events cannot be read; trying again", error=str(error))
                pause_s = OUTAGE_LOOK_S
            except Exception:
                log.exception("Events could not be read; trying again")
                pause_s = OUTAGE_LOOK_S

    def _look(self) -> bool:
        """Take in what is new; True where there may be more at once."""
        assert self._at is not None
        now_s = time.monotonic()
        with self._lock:
            for hole in [hole for hole, since_s in self._holes.items() if now_s - since_s > HOLE_S]:
                del self._holes[hole]
            at, holes = self._at, sorted(self._holes)
        late = [record for first, last in _close_together(holes) for record in self._between(first, last)]
        records = self._ledger().events(after_id=at, limit=PAGE)
        with self._lock:
            fresh = [record for record in late if record.id in self._holes] + records
            for record in fresh:
                self._take(record, now_s)
            wakes = list(self._wakes) if fresh else []
        _wake_all(wakes)
        return len(records) >= PAGE

    def _between(self, first: int, last: int) -> list[EventRecord]:
        return self._ledger().events(after_id=first - 1, limit=last - first + 1)

    def _take(self, record: EventRecord, now_s: float) -> None:
        assert self._at is not None
        if record.id > self._at:
            if record.id - self._at <= PAGE:
                self._holes.update(dict.fromkeys(range(self._at + 1, record.id), now_s))
            self._at = record.id
        else:
            del self._holes[record.id]
        self._events.append(event_of(record, str(self._cursor())))
        self._taken += 1

    def _cursor(self) -> Cursor:
        assert self._at is not None
        return Cursor(self._at, frozenset(self._holes))


def event_of(record: EventRecord, cursor: str) -> Event:
    return Event(record.kind, record.at, record.message, record.id, record.job_id, record.worker_id, cursor)


def _close_together(numbers: list[int]) -> list[tuple[int, int]]:
    """Give the first and last of those that one question finds. However much came behind them is not read again."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number - runs[-1][0] < PAGE:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs


def _wake_all(wakes: list[Wake]) -> None:
    for wake in wakes:
        try:
            wake()
        except RuntimeError:
            pass  # Its event loop was closed: nobody is there to be woken.
