"""One dialog at a time for one kind of news: it blocks nothing, and says more instead of coming twice."""

from PySide6.QtCore import QObject, Qt, QTimer, Signal
from PySide6.QtWidgets import QApplication, QMessageBox

from unstuck.desktop.homing import delete_at_home, keep
from unstuck.desktop.tallies import Tally
from unstuck.logs import logger

log = logger("unstuck.desktop")

REFRESH_MS = 100
"""A dialog that is open takes in news at most so often: a mass crash must not keep the screen busy."""


class Popup(QObject):
    """Call `show` whenever its tally was counted up."""

    closed = Signal()

    def __init__(self, title: str, icon: QMessageBox.Icon, tally: Tally, parent: QObject | None = None) -> None:
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
        delete_at_home(self)
