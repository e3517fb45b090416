"""The desktop program: tray icon with menu, popups, and the thread that follows events."""

import os
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from PySide6.QtCore import QObject, QPointF, QRectF, QSocketNotifier, Qt, Signal
from PySide6.QtGui import QAction, QColor, QIcon, QPainter, QPainterPath, QPen, QPixmap
from PySide6.QtWidgets import QApplication, QMenu, QMessageBox, QSystemTrayIcon

from unstuck.client.runtime import ClientRuntime
from unstuck.config import Settings
from unstuck.config.urls import public_url
from unstuck.desktop.popups import DeadWorkers, Popup, ThreadInbox, UnservedQueues, delete_in_own_thread
from unstuck.domain.events import Event, EventKind
from unstuck.errors import ConfigError, UnstuckError
from unstuck.ledger.contract import Ledger
from unstuck.logs import logger
from unstuck.mailbox import Mailbox
from unstuck.notify.subscriptions import EventFilter, FeedSubscription

log = logger("unstuck.desktop")

SIZES_PX = (16, 22, 24, 32, 48, 64, 128)
GROUND, INK, ALARM = QColor("#1f4e79"), QColor("white"), QColor("#e03131")


def draw_icon(alarmed: bool = False) -> QIcon:
    """A "U" on blue; with a red dot while there is bad news that nobody has looked at."""
    icon = QIcon()
    for size_px in SIZES_PX:
        icon.addPixmap(_draw(size_px, alarmed))
    return icon


def _draw(size_px: int, alarmed: bool) -> QPixmap:
    pixmap = QPixmap(size_px, size_px)
    pixmap.fill(Qt.GlobalColor.transparent)
    painter = QPainter(pixmap)
    painter.setRenderHint(QPainter.RenderHint.Antialiasing)
    painter.scale(size_px / 32, size_px / 32)
    painter.setPen(Qt.PenStyle.NoPen)
    painter.setBrush(GROUND)
    painter.drawRoundedRect(QRectF(1, 1, 30, 30), 7, 7)
    painter.setBrush(Qt.BrushStyle.NoBrush)
    painter.setPen(QPen(INK, 4.5, Qt.PenStyle.SolidLine, Qt.PenCapStyle.RoundCap))
    letter = QPainterPath(QPointF(10, 8))
    letter.lineTo(10, 17)
    letter.arcTo(QRectF(10, 11, 12, 13), 180, 180)
    letter.lineTo(22, 8)
    painter.drawPath(letter)
    if alarmed:
        painter.setPen(QPen(INK, 1.5))
        painter.setBrush(ALARM)
        painter.drawEllipse(QPointF(24, 8), 6.5, 6.5)
    painter.end()
    return pixmap


SHOWN_MS = 10_000
MAX_CHARS = 250


class Tray(QObject):
    """Made only where there is a tray."""

    wantsEnd = Signal()

    def __init__(self, where: str, popups: QAction, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._calm, self._alarmed = draw_icon(), draw_icon(alarmed=True)
        self._where = where
        self.menu = QMenu()
        self._state = self.menu.addAction("")
        self._state.setEnabled(False)
        self.menu.addSeparator()
        self.menu.addAction(popups)
        self.menu.addSeparator()
        self.menu.addAction("Quit").triggered.connect(self.wantsEnd)
        self.icon = QSystemTrayIcon(self._calm, self)
        self.icon.setContextMenu(self.menu)
        for looked in (self.menu.aboutToShow, self.icon.activated, self.icon.messageClicked):
            looked.connect(self.calm)
        self.say_state(f"Opening {where} …")
        self.icon.show()

    def alarm(self) -> None:
        self.icon.setIcon(self._alarmed)

    def calm(self) -> None:
        self.icon.setIcon(self._calm)

    def tell(self, title: str, text: str, icon: QSystemTrayIcon.MessageIcon) -> None:
        self.icon.showMessage(title, _shortened(text), icon, SHOWN_MS)

    def say_trouble(self, sentence: str) -> None:
        """Show what is wrong with the ledger; empty: nothing is."""
        self.say_state(sentence or f"Following {self._where}")

    def say_state(self, sentence: str) -> None:
        short = _shortened(sentence)
        self._state.setText(short)
        self.icon.setToolTip(f"Unstuck: {short}")

    def __del__(self) -> None:
        delete_in_own_thread(self)


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_CHARS else f"{text[: MAX_CHARS - 1]}…"


LOOK_S = 5.0
"""Where nothing happens, the ledger is asked so often whether it is there: silence must not look like peace."""
MAX_UNTOLD = 20_000
CLOSE_S = 5.0


@dataclass(frozen=True)
class Began:
    """From now on no event is missed. Comes once."""


@dataclass(frozen=True)
class Filled:
    """Something is there to be taken from `Follower.untold`."""


@dataclass(frozen=True)
class Trouble:
    """What is wrong with the ledger; empty when it is well."""

    sentence: str


class EventFollower:
    """Posts `Began`, `Filled` and `Trouble`."""

    def __init__(self, settings: Settings, mailbox: Mailbox) -> None:
        self.untold: deque[Event] = deque(maxlen=MAX_UNTOLD)
        self.names: dict[str, str] = {}
        """What the dead are called, by their ids, until somebody takes it from here."""
        self._mailbox = mailbox
        self._runtime = ClientRuntime(settings)
        self._woken = threading.Event()
        self._stopped = False
        self._has_begun = False
        self._said: str | None = None
        self._thread = threading.Thread(target=self._run, name="unstuck-events", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped = True
        self._woken.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)
        self._runtime.close()

    # The thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopped:
            try:
                self._follow()
            except UnstuckError as error:
                self._say(str(error))
                self._woken.wait(LOOK_S)

    def _follow(self) -> None:
        parts = self._runtime.services()
        reading = FeedSubscription(parts.feed, lambda: parts.ledger, self._woken.set, EventFilter())
        try:
            if not self._has_begun:
                self._mailbox.post(Began())
                self._has_begun = True
            self._say("")
            while not self._stopped:
                self._take(reading, parts.ledger)
                is_quiet = not self._woken.wait(min(LOOK_S, reading.max_wait_s))
                self._woken.clear()
                self._say(self._trouble_of(parts.ledger) if is_quiet else "")
        finally:
            reading.close()

    def _take(self, reading: FeedSubscription, ledger: Ledger) -> None:
        events = reading.take()
        self._learn_names(ledger, {event.worker_id for event in events if event.kind == EventKind.WORKER_DEAD})
        was_empty = not self.untold
        self.untold.extend(events)
        # What comes while they are on their way goes with them.
        if events and was_empty:
            self._mailbox.post(Filled())

    def _learn_names(self, ledger: Ledger, dead: set[str | None]) -> None:
        if not dead:
            return
        try:
            self.names.update({worker.id: worker.name for worker in ledger.workers.list() if worker.id in dead})
        except UnstuckError:
            pass  # Their ids have to do.

    def _trouble_of(self, ledger: Ledger) -> str:
        try:
            ledger.events.list(limit=1)
        except UnstuckError as error:
            return str(error)
        return ""

    def _say(self, trouble: str) -> None:
        if trouble != self._said:
            self._said = trouble
            self._mailbox.post(Trouble(trouble))


class FollowerThread(QObject):
    """Signals arrive in the thread of this object."""

    began = Signal()
    """From now on no event is missed."""
    came = Signal(object)
    """A list of what happened just now."""
    troubled = Signal(str)
    """What is wrong with the ledger; empty when it is well."""

    def __init__(self, settings: Settings, parent: QObject | None = None) -> None:
        super().__init__(parent)
        inbox = ThreadInbox(self)
        inbox.came.connect(self._take)
        self._follower = EventFollower(settings, inbox.mailbox)
        self.names = self._follower.names
        self.destroyed.connect(self._follower.stop)

    def start(self) -> None:
        self._follower.start()

    def stop(self) -> None:
        self._follower.stop()

    def _take(self, thing: Began | Filled | Trouble) -> None:
        match thing:
            case Began():
                self.began.emit()
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
        delete_in_own_thread(self)


CRASHED, ABSENT = "Worker Crashed", "No Workers Available"


class DesktopApp(QObject):
    """Tray icon and popups for one ledger. `ended` asks the application to end."""

    following_began = Signal()
    ended = Signal()

    def __init__(self, settings: Settings, *, popups: bool = True, parent: QObject | None = None) -> None:
        super().__init__(parent)
        where = public_url(settings.url)
        self.popups = QAction("Popups", self, checkable=True, checked=popups)
        self._deaths, self._unserved = DeadWorkers(), UnservedQueues()
        self.death_popup = Popup(CRASHED, QMessageBox.Icon.Warning, self._deaths, self)
        self.unserved_popup = Popup(ABSENT, QMessageBox.Icon.Critical, self._unserved, self)
        self.tray = Tray(where, self.popups, self) if QSystemTrayIcon.isSystemTrayAvailable() else None
        if self.tray is not None:
            self.tray.wantsEnd.connect(self.ended)
            # Who closes a popup has read it.
            self.death_popup.closed.connect(self.tray.calm)
            self.unserved_popup.closed.connect(self.tray.calm)
        self._following = FollowerThread(settings, self)
        self._following.began.connect(self.following_began)
        self._following.came.connect(self._tell)
        self._following.troubled.connect(self._say_trouble)
        self._following.start()

    def close(self) -> None:
        self._following.stop()
        self.death_popup.close()
        self.unserved_popup.close()
        if self.tray is not None:
            self.tray.icon.hide()

    def _say_trouble(self, sentence: str) -> None:
        if self.tray is not None:
            self.tray.say_trouble(sentence)
        if sentence:
            log.warning("Cannot follow the events", reason=sentence)

    def _tell(self, events: list[Event]) -> None:
        died = settled = unserved = False
        for event in events:
            if event.kind == EventKind.WORKER_DEAD:
                worker_id = event.worker_id or "?"
                self._deaths.add(worker_id, event.message, self._following.names.pop(worker_id, ""))
                died = True
            elif event.kind == EventKind.NO_WORKERS:
                self._unserved.add(event.message)
                unserved = True
            elif self._deaths.settle(event.worker_id, event.kind):
                settled = True
        if died or (settled and self.death_popup.box is not None):
            self._alert(self.death_popup, self._deaths, QSystemTrayIcon.MessageIcon.Warning)
        if unserved:
            self._alert(self.unserved_popup, self._unserved, QSystemTrayIcon.MessageIcon.Critical)

    def _alert(self, popup: Popup, tally: DeadWorkers | UnservedQueues, icon: QSystemTrayIcon.MessageIcon) -> None:
        if self.tray is not None:
            self.tray.alarm()
        if self.popups.isChecked():
            popup.show()
            return
        if self.tray is not None:
            self.tray.tell(popup.title, tally.text(), icon)
        tally.clear()

    def __del__(self) -> None:
        delete_in_own_thread(self)


SCREENS = ("DISPLAY", "WAYLAND_DISPLAY", "QT_QPA_PLATFORM")


def run(settings: Settings, popups: bool, began: Callable[[], None]) -> None:
    """`began` is called when nothing that happens from then on is missed."""
    if sys.platform == "linux" and not any(os.environ.get(name) for name in SCREENS):
        # Qt would end the process without a word that helps.
        raise ConfigError("There is no screen: neither $DISPLAY nor $WAYLAND_DISPLAY is set. Run this on a desktop.")
    application = QApplication(["unstuck"])
    application.setApplicationName("unstuck")
    application.setApplicationDisplayName("Unstuck")
    application.setWindowIcon(draw_icon())
    if not popups and not QSystemTrayIcon.isSystemTrayAvailable():
        raise ConfigError("This desktop has no tray, so --no-dialogs would show nothing. Leave it out.")
    # A popup may be closed: the icon in the tray stays.
    application.setQuitOnLastWindowClosed(False)
    desktop_app = DesktopApp(settings, popups=popups)
    desktop_app.following_began.connect(began)
    desktop_app.ended.connect(application.quit)
    try:
        with _ended_by_signals(application.quit):
            application.exec()
    finally:
        desktop_app.close()


@contextmanager
def _ended_by_signals(end: Callable[[], None]) -> Iterator[None]:
    """Have signals heard while Qt waits: Python hears them only when Python runs, so each one wakes it."""
    ours, theirs = socket.socketpair()
    for end_of_pair in (ours, theirs):
        end_of_pair.setblocking(False)
    notifier = QSocketNotifier(ours.fileno(), QSocketNotifier.Type.Read)
    notifier.activated.connect(lambda: ours.recv(4096))
    before = {number: signal.signal(number, lambda *_: end()) for number in (signal.SIGINT, signal.SIGTERM)}
    woken_before = signal.set_wakeup_fd(theirs.fileno())
    try:
        yield
    finally:
        signal.set_wakeup_fd(woken_before)
        for number, handler in before.items():
            signal.signal(number, handler)
        notifier.setEnabled(False)
        ours.close()
        theirs.close()
