"""The window: the list of events, and below it all that is known of the chosen one."""

from collections.abc import Iterable

from PySide6.QtCore import QModelIndex, Qt, Signal
from PySide6.QtGui import QCloseEvent, QFontMetrics
from PySide6.QtWidgets import (
    QAbstractItemView,
    QHeaderView,
    QLabel,
    QMainWindow,
    QPlainTextEdit,
    QSplitter,
    QTableView,
)

from unstuck.desktop.event_rows import COLUMNS, TEXT, TIME, EventRows, clock
from unstuck.desktop.homing import delete_at_home
from unstuck.desktop.icon import draw_icon
from unstuck.domain.events import Event

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
        delete_at_home(self)
