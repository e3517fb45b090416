"""Carry things from our threads to the one that draws, without an object of Qt in any of ours.

A signal that is emitted in one thread while its object is deleted in another is a race; a pipe has none.
"""

from PySide6.QtCore import QObject, QSocketNotifier, Signal

from unstuck.worker.mailbox import Mailbox


class Inbox(QObject):
    """Threads post into `mailbox`, and hold nothing else; `came` tells each thing in the thread of this object."""

    came = Signal(object)

    def __init__(self, parent: QObject) -> None:
        super().__init__(parent)
        self.mailbox = Mailbox()
        self._notifier = QSocketNotifier(self.mailbox.fileno(), QSocketNotifier.Type.Read, self)
        self._notifier.activated.connect(self._take)
        # Whoever posts later posts into nothing.
        self.destroyed.connect(self.mailbox.close)

    def _take(self) -> None:
        for thing in self.mailbox.take():
            self.came.emit(thing)
