"""The events as rows of a table, newest first, so many and no more."""

import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from PySide6.QtCore import QAbstractTableModel, QModelIndex, QObject, QPersistentModelIndex, Qt
from PySide6.QtGui import QColor, QGuiApplication

from unstuck.desktop.homing import delete_at_home
from unstuck.domain.events import LEVELS, Event

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
        delete_at_home(self)


def cells(event: Event) -> tuple[str, str, str, str, str]:
    job = "" if event.job_id is None else str(event.job_id)
    # A stack has many lines; all of them stand below the list.
    text = event.message.partition("\n")[0]
    return clock(event.at), event.kind, job, event.worker_id or "", text


def clock(at: float) -> str:
    """The time of day; with the day, where it was another one."""
    then, now = time.localtime(at), time.localtime()
    return time.strftime("%H:%M:%S" if then[:3] == now[:3] else "%Y-%m-%d %H:%M:%S", then)
