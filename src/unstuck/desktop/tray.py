"""The icon in the tray: red while there is bad news that nobody has looked at, with a menu."""

from PySide6.QtCore import QObject, Signal
from PySide6.QtGui import QAction
from PySide6.QtWidgets import QMenu, QSystemTrayIcon

from unstuck.desktop.homing import delete_at_home
from unstuck.desktop.icon import draw_icon

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
        delete_at_home(self)
