"""Run the desktop application until somebody ends it: its menu, its window, Ctrl-C or SIGTERM."""

import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from PySide6.QtCore import QSocketNotifier
from PySide6.QtWidgets import QApplication

from unstuck.config import Settings
from unstuck.desktop.desk import Desk
from unstuck.desktop.icon import draw_icon
from unstuck.domain.errors import ConfigError

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
    desk = Desk(settings, popups=popups)
    desk.following_began.connect(began)
    desk.ended.connect(application.quit)
    try:
        with _ended_by_signals(application.quit):
            application.exec()
    finally:
        desk.close()


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
