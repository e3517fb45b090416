"""The desktop application: what happens in a ledger goes into the list, and bad news to the eye."""

from PySide6.QtCore import QObject, Signal
from PySide6.QtGui import QAction
from PySide6.QtWidgets import QMessageBox, QSystemTrayIcon

from unstuck.config import Settings
from unstuck.config.public_url import public_url
from unstuck.desktop.following import Following
from unstuck.desktop.homing import delete_at_home
from unstuck.desktop.popup import Popup
from unstuck.desktop.tallies import DeathTally, UnservedTally
from unstuck.desktop.tray import Tray
from unstuck.desktop.window import Window
from unstuck.domain.events import Event, EventKind

CRASHED, ABSENT = "Worker Crashed", "No Workers Available"


class Desk(QObject):
    """Window, tray icon and popups for one ledger. `ended` asks the application to end."""

    following_began = Signal()
    ended = Signal()

    def __init__(self, settings: Settings, *, popups: bool = True, parent: QObject | None = None) -> None:
        super().__init__(parent)
        where = public_url(settings.url)
        self.window = Window(where)
        self.popups = QAction("Popups", self, checkable=True, checked=popups)
        self._deaths, self._unserved = DeathTally(), UnservedTally()
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
        self._following = Following(settings, self)
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

    def _alert(self, popup: Popup, tally: DeathTally | UnservedTally, icon: QSystemTrayIcon.MessageIcon) -> None:
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
        delete_at_home(self)
