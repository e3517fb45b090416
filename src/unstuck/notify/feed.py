"""The feed of events: one thread per process asks the ledger for everybody who listens.

It keeps the last few thousand events. A reader pulls what it has not seen, so a slow one holds up nobody; one that
falls too far behind is told of the gap and goes on with what is new. An event is delivered when it is committed, in
whatever order transactions commit; see `domain/event_cursor.py`.
"""

import threading
import time
from collections import deque
from collections.abc import Callable

from unstuck.domain.event_cursor import Cursor
from unstuck.domain.events import Event, EventKind
from unstuck.errors import UnstuckError
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.events import EventPage, EventRecord
from unstuck.logs import logger

LOOK_S = 0.2
OUTAGE_LOOK_S = 1.0
PAGE = 500
KEPT = 10_000

log = logger("unstuck.notify")

Wake = Callable[[], None]
Buffered = tuple[int, Event]
"""The transaction of an event, and the event; of a gap the transaction is 0."""


class EventFeed:
    def __init__(self, ledger: Callable[[], Ledger]) -> None:
        self._ledger = ledger
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._wakes: set[Wake] = set()
        self._events: deque[Buffered] = deque(maxlen=KEPT)
        self._taken = 0
        """How many events were ever taken in: the offset of the next one."""
        self.cursor = Cursor()
        """The position behind everything that was taken in."""
        self._was_blind = False
        self._thread: threading.Thread | None = None

    # What readers call --------------------------------------------------------------------------

    def subscribe(self, wake: Wake) -> tuple[int, Cursor]:
        """Be woken with everything new; return from where on to pull, and what was seen until then."""
        with self._lock:
            if self._thread is None:
                # Nobody listened: what happened meanwhile is no news. What is not committed yet will be.
                self.cursor = self._ledger().events.newest_cursor()
                self._was_blind = False
                self._thread = threading.Thread(target=self._run, name="unstuck-events", daemon=True)
                self._thread.start()
            self._wakes.add(wake)
            return self._taken, self.cursor

    def unsubscribe(self, wake: Wake) -> None:
        with self._lock:
            self._wakes.discard(wake)
            self._changed.notify_all()

    def wake_all(self) -> None:
        """Wake everybody, news or not."""
        with self._lock:
            wakes = list(self._wakes)
        _wake_all(wakes)

    def read(self, offset: int) -> tuple[list[Buffered], int, int]:
        """Return what came since `offset`, the next offset, and how many are kept no more and were passed over."""
        with self._lock:
            kept_from = self._taken - len(self._events)
            missed = max(0, kept_from - offset)
            start = max(offset, kept_from) - kept_from
            return [self._events[at] for at in range(start, len(self._events))], self._taken, missed

    # The thread ---------------------------------------------------------------------------------

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
                self._was_blind = False
            except UnstuckError as error:
                if pause_s == LOOK_S:
                    log.warning("Events cannot be read; trying again", error=str(error))
                pause_s, self._was_blind = OUTAGE_LOOK_S, True
            except Exception:
                log.exception("Events could not be read; trying again")
                pause_s, self._was_blind = OUTAGE_LOOK_S, True

    def _look(self) -> bool:
        """Take in what is new; return whether there may be more at once."""
        page = self._ledger().events.since(self.cursor, limit=PAGE)
        if page.contradicts(self.cursor) or (self._was_blind and not page.is_known):
            self._begin_again(self._ledger().events.newest_cursor())
            return False
        with self._lock:
            for record in page.events:
                self._take(record, page)
            is_full = len(page.events) >= PAGE
            if not is_full:
                self.cursor = self.cursor.settled(page.running)
            wakes = list(self._wakes) if page.events else []
        _wake_all(wakes)
        return is_full

    def _begin_again(self, cursor: Cursor) -> None:
        """Report a gap to everyone: the history that was read is not the one that the ledger has now."""
        log.warning("Events may have been passed over: the ledger does not have the last event that was read")
        with self._lock:
            self.cursor = cursor
            self._append(0, gap(UNKNOWN, str(cursor)))
            wakes = list(self._wakes)
        _wake_all(wakes)

    def _take(self, record: EventRecord, page: EventPage) -> None:
        self.cursor = self.cursor.after(record.transaction, record.id, record.at, page.running)
        self._append(record.transaction, event_of(record, str(self.cursor)))

    def _append(self, transaction: int, event: Event) -> None:
        self._events.append((transaction, event))
        self._taken += 1


UNKNOWN = "Events may have been passed over: the ledger does not know this position (any more)"


def gap(message: str, cursor: str, missed: int = 1) -> Event:
    """Return the event that reports that others were passed over."""
    return Event(EventKind.GAP, time.time(), message, cursor=cursor, count=missed)


def event_of(record: EventRecord, cursor: str) -> Event:
    return Event(record.kind, record.at, record.message, record.id, record.job_id, record.worker_id, cursor)


def _wake_all(wakes: list[Wake]) -> None:
    for wake in wakes:
        try:
            wake()
        except RuntimeError:
            pass  # Its event loop was closed: nobody is there to be woken.
