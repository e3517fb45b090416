"""The thread that follows the events of a ledger, without an object of Qt in it."""

import threading
from collections import deque
from dataclasses import dataclass

from unstuck.client.counter import Counter
from unstuck.config import Settings
from unstuck.domain.errors import UnstuckError
from unstuck.domain.events import Event, EventKind
from unstuck.notify.feed import event_of, gap
from unstuck.notify.subscription import Choice, Subscription
from unstuck.store.contract import Ledger
from unstuck.worker.mailbox import Mailbox

EARLIER = 200
"""So many of the events before our time are shown too."""
LOOK_S = 5.0
"""Where nothing happens, the ledger is asked so often whether it is there: silence must not look like peace."""
MAX_UNTOLD = 20_000
CLOSE_S = 5.0


@dataclass(frozen=True)
class Began:
    """What happened before, once."""

    events: list[Event]


@dataclass(frozen=True)
class Filled:
    """Something is there to be taken from `Follower.untold`."""


@dataclass(frozen=True)
class Trouble:
    """What is wrong with the ledger; empty when it is well."""

    sentence: str


class Follower:
    """Posts `Began`, `Filled` and `Trouble`."""

    def __init__(self, settings: Settings, mailbox: Mailbox) -> None:
        self.untold: deque[Event] = deque(maxlen=MAX_UNTOLD)
        self.names: dict[str, str] = {}
        """What the dead are called, by their ids, until somebody takes it from here."""
        self._mailbox = mailbox
        self._counter = Counter(settings)
        self._woken = threading.Event()
        self._stopped = False
        self._has_begun = False
        self._said: str | None = None
        self._thread = threading.Thread(target=self._run, name="unstuck-popups", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped = True
        self._woken.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)
        self._counter.close()

    # The thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopped:
            try:
                self._follow()
            except UnstuckError as error:
                self._say(str(error))
                self._woken.wait(LOOK_S)

    def _follow(self) -> None:
        parts = self._counter.parts()
        reading = Subscription(parts.feed, lambda: parts.ledger, self._woken.set, Choice())
        try:
            if not self._has_begun:
                # Read when we have joined, so that nothing falls between the two; what is in both is shown once.
                self._mailbox.post(Began([event_of(record, "") for record in parts.ledger.events(limit=EARLIER)]))
                self._has_begun = True
            self._say("")
            while not self._stopped:
                self._take(reading, parts.ledger)
                is_quiet = not self._woken.wait(min(LOOK_S, reading.patience_s))
                self._woken.clear()
                self._say(self._trouble_of(parts.ledger) if is_quiet else "")
        finally:
            reading.close()

    def _take(self, reading: Subscription, ledger: Ledger) -> None:
        events = reading.take()
        self._learn_names(ledger, {event.worker_id for event in events if event.kind == EventKind.WORKER_DEAD})
        was_empty = not self.untold
        lost = max(0, len(self.untold) + len(events) - MAX_UNTOLD)
        if lost:
            events.append(gap(f"{lost} events were passed over: they were not drawn in time", events[-1].cursor, lost))
        self.untold.extend(events)
        # What comes while they are on their way goes with them.
        if events and was_empty:
            self._mailbox.post(Filled())

    def _learn_names(self, ledger: Ledger, dead: set[str | None]) -> None:
        if not dead:
            return
        try:
            self.names.update({worker.id: worker.name for worker in ledger.workers() if worker.id in dead})
        except UnstuckError:
            pass  # Their ids have to do.

    def _trouble_of(self, ledger: Ledger) -> str:
        try:
            ledger.events(limit=1)
        except UnstuckError as error:
            return str(error)
        return ""

    def _say(self, trouble: str) -> None:
        if trouble != self._said:
            self._said = trouble
            self._mailbox.post(Trouble(trouble))
