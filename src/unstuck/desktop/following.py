"""Hand the events of a ledger to the thread that draws, many at once."""

from PySide6.QtCore import QObject, Signal

from unstuck.config import Settings
from unstuck.desktop.follower import Began, Filled, Follower, Trouble
from unstuck.desktop.homing import delete_at_home
from unstuck.desktop.inbox import Inbox


class Following(QObject):
    """Signals arrive in the thread of this object."""

    earlier = Signal(object)
    """A list of what happened before, once."""
    came = Signal(object)
    """A list of what happened just now."""
    troubled = Signal(str)
    """What is wrong with the ledger; empty when it is well."""

    def __init__(self, settings: Settings, parent: QObject | None = None) -> None:
        super().__init__(parent)
        inbox = Inbox(self)
        inbox.came.connect(self._take)
        self._follower = Follower(settings, inbox.mailbox)
        self.names = self._follower.names
        self.destroyed.connect(self._follower.stop)

    def start(self) -> None:
        self._follower.start()

    def stop(self) -> None:
        self._follower.stop()

    def _take(self, thing: Began | Filled | Trouble) -> None:
        match thing:
            case Began():
                self.earlier.emit(thing.events)
            case Filled():
                self._hand_over()
            case Trouble():
                self.troubled.emit(thing.sentence)

    def _hand_over(self) -> None:
        untold, events = self._follower.untold, []
        while untold:
            events.append(untold.popleft())
        if events:
            self.came.emit(events)

    def __del__(self) -> None:
        delete_at_home(self)
