"""The desktop program: tray icon with menu, event window, and the thread that follows events."""

import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from PySide6.QtCore import (
    QAbstractTableModel,
    QModelIndex,
    QObject,
    QPersistentModelIndex,
    QPointF,
    QRectF,
    QSocketNotifier,
    Qt,
    Signal,
)
from PySide6.QtGui import (
    QAction,
    QCloseEvent,
    QColor,
    QFontMetrics,
    QGuiApplication,
    QIcon,
    QPainter,
    QPainterPath,
    QPen,
    QPixmap,
)
from PySide6.QtWidgets import (
    QAbstractItemView,
    QApplication,
    QHeaderView,
    QLabel,
    QMainWindow,
    QMenu,
    QMessageBox,
    QPlainTextEdit,
    QSplitter,
    QSystemTrayIcon,
    QTableView,
)

from unstuck.client.runtime import ClientRuntime
from unstuck.config import Settings
from unstuck.config.urls import public_url
from unstuck.desktop.popups import DeadWorkers, Popup, ThreadInbox, UnservedQueues, delete_in_own_thread
from unstuck.domain.events import LEVELS, Event, EventKind
from unstuck.errors import ConfigError, UnstuckError
from unstuck.ledger.contract import Ledger
from unstuck.mailbox import Mailbox
from unstuck.notify.feed import event_of, gap
from unstuck.notify.subscriptions import EventFilter, FeedSubscription

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

    wantsWindow = Signal()
    wantsEnd = Signal()

    def __init__(self, where: str, popups: QAction, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._calm, self._alarmed = draw_icon(), draw_icon(alarmed=True)
        self.menu = QMenu()
        self.menu.addAction("Show events").triggered.connect(self.wantsWindow)
        self.menu.addAction(popups)
        self.menu.addSeparator()
        self.menu.addAction("Quit").triggered.connect(self.wantsEnd)
        self.icon = QSystemTrayIcon(self._calm, self)
        self.icon.setToolTip(f"Unstuck: {where}")
        self.icon.setContextMenu(self.menu)
        self.icon.activated.connect(self._clicked)
        self.icon.messageClicked.connect(self.wantsWindow)
        self.icon.show()

    def alarm(self) -> None:
        self.icon.setIcon(self._alarmed)

    def calm(self) -> None:
        self.icon.setIcon(self._calm)

    def tell(self, title: str, text: str, icon: QSystemTrayIcon.MessageIcon) -> None:
        short = text if len(text) <= MAX_CHARS else f"{text[: MAX_CHARS - 1]}…"
        self.icon.showMessage(title, short, icon, SHOWN_MS)

    def _clicked(self, reason: QSystemTrayIcon.ActivationReason) -> None:
        if reason == QSystemTrayIcon.ActivationReason.Trigger:
            self.wantsWindow.emit()

    def __del__(self) -> None:
        delete_in_own_thread(self)


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
                # Read when we have joined, so that nothing falls between the two; what is in both is shown once.
                self._mailbox.post(Began([event_of(record, "") for record in parts.ledger.events(limit=EARLIER)]))
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


class FollowerThread(QObject):
    """Signals arrive in the thread of this object."""

    earlier = Signal(object)
    """A list of what happened before, once."""
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
        delete_in_own_thread(self)


CRASHED, ABSENT = "Worker Crashed", "No Workers Available"


class DesktopApp(QObject):
    """Window, tray icon and popups for one ledger. `ended` asks the application to end."""

    following_began = Signal()
    ended = Signal()

    def __init__(self, settings: Settings, *, popups: bool = True, parent: QObject | None = None) -> None:
        super().__init__(parent)
        where = public_url(settings.url)
        self.window = Window(where)
        self.popups = QAction("Popups", self, checkable=True, checked=popups)
        self._deaths, self._unserved = DeadWorkers(), UnservedQueues()
        self.death_popup = Popup(CRASHED, QMessageBox.Icon.Warning, self._deaths, self)
        self.unserved_popup = Popup(ABSENT, QMessageBox.Icon.Critical, self._unserved, self)
        self.tray = Tray(where, self.popups, self) if QSystemTrayIcon.isSystemTrayAvailable() else None
        if self.tray is None:
            # There is no other way back to a window that was closed.
            self.window.wasClosed.connect(self.ended)
            self.window.show()
        else:
            self.tray.wantsWindow.connect(self._show_window)
            self.tray.wantsEnd.connect(self.ended)
            # Who closes a popup has read it.
            self.death_popup.closed.connect(self.tray.calm)
            self.unserved_popup.closed.connect(self.tray.calm)
        self._following = FollowerThread(settings, self)
        self._following.earlier.connect(self._begin)
        self._following.came.connect(self._tell)
        self._following.troubled.connect(self.window.say_trouble)
        self._following.start()

    def close(self) -> None:
        self._following.stop()
        self.death_popup.close()
        self.unserved_popup.close()
        if self.tray is not None:
            self.tray.icon.hide()
        self.window.close()

    def _begin(self, events: list[Event]) -> None:
        self.window.add(events)
        self.following_began.emit()

    def _tell(self, events: list[Event]) -> None:
        self.window.add(events)
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
        if self.tray is not None and not self.window.isActiveWindow():
            self.tray.alarm()
        if self.popups.isChecked():
            popup.show()
            return
        if self.tray is not None:
            self.tray.tell(popup.title, tally.text(), icon)
        tally.clear()

    def _show_window(self) -> None:
        self.window.show()
        self.window.raise_()
        self.window.activateWindow()
        if self.tray is not None:
            self.tray.calm()

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
    # The window may be closed: the icon in the tray stays.
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


WIDTH_PX, HEIGHT_PX = 960, 520
WIDEST = ("00:00:00", "worker_recovered", "12345678", "k98cfw3jy0e9m")
"""So much has to fit into a column."""


class Window(QMainWindow):
    wasClosed = Signal()

    def __init__(self, where: str) -> None:
        super().__init__()
        self.setWindowTitle("Unstuck events")
        self.setWindowIcon(draw_icon())
        self.resize(WIDTH_PX, HEIGHT_PX)
        self.rows = EventRows(self)
        self.table = self._new_table()
        self.details = QPlainTextEdit()
        self.details.setReadOnly(True)
        self.details.setPlaceholderText("Choose an event to read all of it.")
        split = QSplitter(Qt.Orientation.Vertical)
        split.addWidget(self.table)
        split.addWidget(self.details)
        split.setStretchFactor(0, 4)
        split.setStretchFactor(1, 1)
        split.setSizes([HEIGHT_PX * 3 // 4, HEIGHT_PX // 4])
        self.setCentralWidget(split)
        self._where = where
        self.state = QLabel()
        self.statusBar().addWidget(self.state, 1)
        self.say_state(f"Opening {where} …")

    def add(self, events: Iterable[Event]) -> None:
        self.rows.add(events)

    def say_state(self, sentence: str) -> None:
        """Say below the list whether it can be believed."""
        self.state.setText(sentence)

    def say_trouble(self, sentence: str) -> None:
        self.say_state(sentence or f"Following {self._where}")

    def closeEvent(self, event: QCloseEvent) -> None:
        super().closeEvent(event)
        self.wasClosed.emit()

    def _new_table(self) -> QTableView:
        table = QTableView()
        table.setModel(self.rows)
        table.setSelectionBehavior(QAbstractItemView.SelectionBehavior.SelectRows)
        table.setSelectionMode(QAbstractItemView.SelectionMode.SingleSelection)
        table.setAlternatingRowColors(True)
        table.setShowGrid(False)
        table.setWordWrap(False)
        table.verticalHeader().hide()
        metrics = QFontMetrics(table.font())
        table.verticalHeader().setDefaultSectionSize(metrics.height() + 8)
        for column, widest in zip(range(len(COLUMNS)), WIDEST, strict=False):
            table.setColumnWidth(column, metrics.horizontalAdvance(widest) + 16)
        # Times have a day only where it was another one.
        table.horizontalHeader().setSectionResizeMode(TIME, QHeaderView.ResizeMode.ResizeToContents)
        table.horizontalHeader().setSectionResizeMode(TEXT, QHeaderView.ResizeMode.Stretch)
        table.selectionModel().currentRowChanged.connect(self._tell_all)
        return table

    def _tell_all(self, current: QModelIndex) -> None:
        if not current.isValid():
            self.details.clear()
            return
        event = self.rows.event_at(current.row())
        facts = [event.kind, clock(event.at)]
        facts += [f"job {event.job_id}"] if event.job_id is not None else []
        facts += [f"worker {event.worker_id}"] if event.worker_id is not None else []
        self.details.setPlainText(f"{', '.join(facts)}\n\n{event.message}")

    def __del__(self) -> None:
        delete_in_own_thread(self)


MAX_ROWS = 1_000
COLUMNS = ("Time", "Kind", "Job", "Worker", "Text")
TIME, KIND, TEXT = 0, 1, 4

Index = QModelIndex | QPersistentModelIndex
Role = Qt.ItemDataRole

ON_LIGHT = {"problem": "#b3261e", "warning": "#8a5a00", "good": "#1b7a36"}
ON_DARK = {"problem": "#ff8a80", "warning": "#ffca6b", "good": "#7ddc98"}


class EventRows(QAbstractTableModel):
    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._events: deque[Event] = deque()
        self._ids: set[int] = set()

    def add(self, events: Iterable[Event]) -> None:
        """Put these on top, the last one first; what is there already stays where it is."""
        fresh = [event for event in events if event.id is None or event.id not in self._ids][-MAX_ROWS:]
        if not fresh:
            return
        self.beginInsertRows(QModelIndex(), 0, len(fresh) - 1)
        self._events.extendleft(fresh)
        self._ids.update(event.id for event in fresh if event.id is not None)
        self.endInsertRows()
        if len(self._events) > MAX_ROWS:
            self.beginRemoveRows(QModelIndex(), MAX_ROWS, len(self._events) - 1)
            while len(self._events) > MAX_ROWS:
                self._ids.discard(self._events.pop().id or 0)
            self.endRemoveRows()

    def event_at(self, row: int) -> Event:
        return self._events[row]

    # What Qt asks -------------------------------------------------------------------------------

    def rowCount(self, parent: Index = QModelIndex()) -> int:  # noqa: B008 - as Qt declares it
        return 0 if parent.isValid() else len(self._events)

    def columnCount(self, parent: Index = QModelIndex()) -> int:  # noqa: B008 - as Qt declares it
        return 0 if parent.isValid() else len(COLUMNS)

    def headerData(self, section: int, orientation: Qt.Orientation, role: int = Role.DisplayRole) -> Any:
        if role == Role.DisplayRole and orientation == Qt.Orientation.Horizontal:
            return COLUMNS[section]
        if role == Role.TextAlignmentRole and orientation == Qt.Orientation.Horizontal:
            return Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter
        return None

    def data(self, index: Index, role: int = Role.DisplayRole) -> Any:
        event = self._events[index.row()]
        if role == Role.DisplayRole:
            return cells(event)[index.column()]
        if role == Role.ForegroundRole and index.column() == KIND and event.kind in LEVELS:
            is_dark = QGuiApplication.palette().base().color().lightness() < 128
            return QColor((ON_DARK if is_dark else ON_LIGHT)[LEVELS[event.kind]])
        return None

    def __del__(self) -> None:
        delete_in_own_thread(self)


def cells(event: Event) -> tuple[str, str, str, str, str]:
    job = "" if event.job_id is None else str(event.job_id)
    # A stack has many lines; all of them stand below the list.
    text = event.message.partition("\n")[0]
    return clock(event.at), event.kind, job, event.worker_id or "", text


def clock(at: float) -> str:
    """The time of day; with the day, where it was another one."""
    then, now = time.localtime(at), time.localtime()
    return time.strftime("%H:%M:%S" if then[:3] == now[:3] else "%Y-%m-%d %H:%M:%S", then)
