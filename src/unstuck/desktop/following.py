"""Follow the events of a ledger in a thread, and hand them to the one that draws, many at once."""

import threading
from collections import deque

from PySide6.QtCore import QObject, Qt, Signal

from unstuck.client.counter import Counter
from unstuck.config import Settings
from unstuck.domain.errors import UnstuckError
from unstuck.domain.events import Event, EventKind
from unstuck.notify.feed import event_of
from unstuck.notify.subscription import Choice, Subscription
from unstuck.store.contract import Ledger

EARLIER = 200
"""So many of the events before our time are shown too."""
LOOK_S = 5.0
"""Where nothing happens, the ledger is asked so often whether it is there: silence must not look like peace."""
MAX_UNTOLD = 20_000
CLOSE_S = 5.0


class Following(QObject):
    """Signals arrive in the thread of this object."""

    earlier = Signal(object)
    """A list of what happened before, once."""
    came = Signal(object)
    """A list of what happened just now."""
    troubled = Signal(str)
    """What is wrong with the ledger; empty when it is well."""

    _filled = Signal()
    _began = Signal(object)
    _trouble = Signal(str)

    def __init__(self, settings: Settings, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._counter = Counter(settings)
        self._untold: deque[Event] = deque(maxlen=MAX_UNTOLD)
        self._woken = threading.Event()
        self._stopped = False
        self._has_begun = False
        self.names: dict[str, str] = {}
        """What the dead are called, by their ids, until somebody takes it from here."""
        self._said: str | None = None
        queued = Qt.ConnectionType.QueuedConnection
        self._filled.connect(self._hand_over, queued)
        self._began.connect(self.earlier, queued)
        self._trouble.connect(self.troubled, queued)
        self._thread = threading.Thread(target=self._run, name="unstuck-popups", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped = True
        self._woken.set()
        self._thread.join(CLOSE_S)
        self._counter.close()

    def _hand_over(self) -> None:
        events = []
        while self._untold:
            events.append(self._untold.popleft())
        if events:
            self.came.emit(events)

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
                self._began.emit([event_of(record, "") for record in parts.ledger.events(limit=EARLIER)])
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
        was_empty = not self._untold
        self._untold.extend(events)
        # What comes while they are on their way goes with them.
        if events and was_empty:
            self._filled.emit()

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
            self._trouble.emit(trouble)
