"""An invisible screen: Qt in this process, and a way to wait while it works.

Modules that import this are skipped where a library of the system that Qt needs is missing, and only there.
"""

import os
from collections.abc import Callable
from typing import TypeVar

import pytest
from tests.support.fleet import wait_for

# Also of the processes that tests start; whatever screen this machine has is not ours.
os.environ["QT_QPA_PLATFORM"] = "offscreen"

try:
    from PySide6.QtCore import QEvent
    from PySide6.QtWidgets import QApplication, QMessageBox, QSystemTrayIcon
except ModuleNotFoundError:
    raise
except ImportError as error:
    pytest.skip(f"Qt cannot be loaded: {error}", allow_module_level=True)

__all__ = ["QMessageBox", "QSystemTrayIcon", "Screen"]

T = TypeVar("T")


class Screen:
    def __init__(self) -> None:
        found = QApplication.instance()
        self.application = found if isinstance(found, QApplication) else QApplication(["tests"])
        self.application.setQuitOnLastWindowClosed(False)

    def work(self) -> None:
        self.application.processEvents()
        # Those that are to be deleted wait for a loop to end, and there is none.
        self.application.sendPostedEvents(None, QEvent.Type.DeferredDelete.value)

    def wait_for(self, look: Callable[[], T | None], what: str) -> T:
        """Let Qt work until `look` returns something true, and return it."""

        def look_after_work() -> T | None:
            self.work()
            return look()

        found = wait_for(look_after_work, what)
        assert found is not None
        return found

    def dialogs(self) -> list[QMessageBox]:
        """Every popup that is on the screen."""
        return [
            widget
            for widget in self.application.topLevelWidgets()
            if isinstance(widget, QMessageBox) and widget.isVisible()
        ]

    def clear(self) -> None:
        for dialog in self.dialogs():
            dialog.close()
        self.work()
