"""Popups about crashes: show and summarise them, and delete Qt objects in the thread that they live in.

Python drops an object in the thread that lets go of it last, and garbage in whichever thread happens to collect. Qt
ends a process whose windows and timers go in a foreign one. So each object of ours asks Qt to delete it at home.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from PySide6.QtCore import QObject, QSocketNotifier, Qt, QTimer, Signal
from PySide6.QtWidgets import QApplication, QMessageBox
from shiboken6 import isValid, ownedByPython

from unstuck.logs import logger
from unstuck.mailbox import Mailbox

_kept: dict[int, QObject] = {}


def keep(thing: QObject) -> None:
    """Hold it until Qt has deleted it, in its own thread; what is then left of it can be dropped in any."""
    key = id(thing)

    def let_go() -> None:
        _kept.pop(key, None)

    _kept[key] = thing
    thing.destroyed.connect(let_go, Qt.ConnectionType.DirectConnection)


def delete_in_own_thread(thing: QObject) -> None:
    """For `__del__`: nobody in Python needs it any more. What has a parent goes with that one."""
    if not (isValid(thing) and ownedByPython(thing)):
        return
    try:
        keep(thing)
        thing.deleteLater()
    except RuntimeError:
        # Somebody else had asked Qt to delete it, and that has just been done.
        _kept.pop(id(thing), None)


class ThreadInbox(QObject):
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


MAX_NAMED = 5
MAX_MESSAGE_CHARS = 600
MAX_NAME_CHARS = 80

BECAME = {
    "requeued": "queued again",
    "retrying": "tried again",
    "failed": "failed",
    "quarantined": "quarantined",
    "cancelled": "cancelled",
}
"""What becomes of the jobs of a dead worker, by the kind of the event that tells it."""


class Summary(Protocol):
    def text(self) -> str: ...

    def clear(self) -> None: ...


@dataclass
class CrashedCalls:
    """Workers that crashed at jobs of ours, as a broker tells it."""

    jobs: Counter[str] = field(default_factory=Counter)
    message: str = ""
    lost: int = 0
    """So many of them will not be tried again."""

    def add(self, job: str, message: str, *, final: bool = False, count: int = 1) -> None:
        self.jobs[job] += count
        self.message = message
        # Only of the one that is told do we know that it is the last word.
        self.lost += final

    def clear(self) -> None:
        self.jobs.clear()
        self.lost = 0

    def text(self) -> str:
        total = self.jobs.total()
        if total == 1:
            head = f"A worker processing job {_quoted(self.jobs)} has crashed."
            tail = "The job will not be retried." if self.lost else "The job will be automatically retried."
        else:
            head = f"Workers have crashed {total:,} times, processing {_quoted(self.jobs)}."
            tail = self._tail_of_many(total)
        return "\n\n".join((head, _short(self.message), tail))

    def _tail_of_many(self, total: int) -> str:
        if not self.lost:
            return "The jobs will be automatically retried."
        if self.lost == total:
            return "The jobs will not be retried."
        return f"{self.lost:,} of them will not be retried, the others automatically."


@dataclass
class UnservedCalls:
    """Jobs of ours that nobody is there for, as a broker tells it."""

    jobs: Counter[str] = field(default_factory=Counter)
    message: str = ""

    def add(self, job: str, message: str, *, count: int = 1) -> None:
        self.jobs[job] += count
        self.message = message

    def clear(self) -> None:
        self.jobs.clear()

    def text(self) -> str:
        total = self.jobs.total()
        what = f"job {_quoted(self.jobs)}" if total == 1 else f"{total:,} jobs: {_quoted(self.jobs)}"
        head = f"No workers are available to process {what}."
        return "\n\n".join((head, _short(self.message), "Please start worker servers and try again."))


@dataclass
class DeadWorkers:
    """Workers that died, as the ledger tells it, and what became of their jobs."""

    workers: dict[str, str] = field(default_factory=dict)
    """What the dead are called, by their ids, in their order."""
    message: str = ""
    became: Counter[str] = field(default_factory=Counter)

    def add(self, worker_id: str, message: str, name: str = "") -> None:
        self.workers[worker_id] = f"{name} ({worker_id})" if name else worker_id
        self.message = message

    def settle(self, worker_id: str | None, kind: str) -> bool:
        """Count what became of a job, if one of these workers held it; True if so."""
        counts = worker_id in self.workers and kind in BECAME
        self.became[kind] += counts
        return counts

    def clear(self) -> None:
        self.workers.clear()
        self.became.clear()

    def text(self) -> str:
        names = list(self.workers.values())
        if len(names) == 1:
            head = f"Worker {_listed(names)} has died."
        else:
            head = f"{len(names):,} workers have died: {_listed(names)}."
        return "\n\n".join((head, _short(self.message), self._fates(len(names))))

    def _fates(self, dead: int) -> str:
        fates = [f"{count:,} {BECAME[kind]}" for kind, count in self.became.items() if count]
        owner = "its" if dead == 1 else "their"
        if not fates:
            return f"What becomes of {owner} jobs is each job's own rule; `unstuck why JOB` tells."
        return f"What became of {owner} jobs: {', '.join(fates)}."


@dataclass
class UnservedQueues:
    """Queues that nobody serves, as the ledger tells it."""

    messages: dict[str, None] = field(default_factory=dict)
    """In the order of their first time."""

    def add(self, message: str) -> None:
        self.messages.setdefault(_short(message))

    def clear(self) -> None:
        self.messages.clear()

    def text(self) -> str:
        shown = list(self.messages)[:MAX_NAMED]
        if more := len(self.messages) - len(shown):
            shown.append(f"And {more:,} more.")
        return "\n\n".join(
            (*shown, "Please start worker servers. What is queued stays queued, and runs when one comes.")
        )


def _quoted(jobs: Counter[str]) -> str:
    """Name the commonest jobs, with how many of each where there are several."""
    several = jobs.total() > 1
    return _listed([f"'{_cut(job)}'" + (f" ({count:,})" if several else "") for job, count in jobs.most_common()])


def _listed(names: Iterable[str]) -> str:
    every = [_cut(name) for name in names]
    more = f" and {len(every) - MAX_NAMED:,} more" if len(every) > MAX_NAMED else ""
    return ", ".join(every[:MAX_NAMED]) + more


def _cut(name: str) -> str:
    return name if len(name) <= MAX_NAME_CHARS else f"{name[: MAX_NAME_CHARS - 1]}…"


def _short(message: str) -> str:
    return message if len(message) <= MAX_MESSAGE_CHARS else f"{message[: MAX_MESSAGE_CHARS - 1]}…"


log = logger("unstuck.desktop")

REFRESH_MS = 100
"""A dialog that is open takes in news at most so often: a mass crash must not keep the screen busy."""


class Popup(QObject):
    """Call `show` whenever its tally was counted up."""

    closed = Signal()

    def __init__(self, title: str, icon: QMessageBox.Icon, tally: Summary, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.title = title
        self.box: QMessageBox | None = None
        """The dialog, while there is one."""
        self._icon = icon
        self._tally = tally
        self._refresh = QTimer(self)
        self._refresh.setSingleShot(True)
        self._refresh.setInterval(REFRESH_MS)
        self._refresh.timeout.connect(self._write)

    def show(self) -> None:
        if self.box is not None:
            if not self._refresh.isActive():
                self._refresh.start()
            return
        if not isinstance(QApplication.instance(), QApplication):
            # Qt ends a process that makes a widget without one.
            log.warning(f"{self.title}: there is no QApplication to show a popup", text=self._tally.text())
            self._tally.clear()
            return
        self.box = self._new_box()
        self._write()
        self.box.show()

    def close(self) -> None:
        if self.box is not None:
            self.box.close()

    def _new_box(self) -> QMessageBox:
        box = QMessageBox(self._icon, self.title, "", QMessageBox.StandardButton.Ok)
        # Messages come from afar, and what looks like markup in them is none.
        box.setTextFormat(Qt.TextFormat.PlainText)
        box.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        box.setWindowModality(Qt.WindowModality.NonModal)
        box.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        # Whoever types elsewhere goes on typing there, and does not close it by a blank.
        box.setAttribute(Qt.WidgetAttribute.WA_ShowWithoutActivating)
        # To close the last popup does not end an application that lives in the tray.
        box.setAttribute(Qt.WidgetAttribute.WA_QuitOnClose, False)
        box.finished.connect(self._forget)
        # It stays until somebody has read it, also when whoever opened it is gone.
        keep(box)
        return box

    def _write(self) -> None:
        if self.box is not None:
            self.box.setText(self._tally.text())

    def _forget(self) -> None:
        self._refresh.stop()
        self.box = None
        self._tally.clear()
        self.closed.emit()

    def __del__(self) -> None:
        delete_in_own_thread(self)
