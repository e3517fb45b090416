"""Let clients, popups and desks come and go while other threads collect the garbage: Qt must not notice.

    python -m tests.desktop.garbage CLIENTS URL

Python's own collector rests, so that whatever is in a cycle is found by a thread that draws nothing. Prints how many
came, and how many of their threads are left.
"""

import gc
import sys
import threading
import time
from typing import Any

from PySide6.QtCore import QEvent, QObject
from PySide6.QtWidgets import QApplication
from tests.mdp.broker import Played, notice, played
from tests.support.fleet import TIMEOUT_S

from unstuck.config import build
from unstuck.desktop.app import DesktopApp
from unstuck.mdp.qt import NotifyingClient

CRASHED, ABSENT = b"\x08", b"\x09"


class Collectors:
    """Threads that collect, and that let go of what they are given."""

    def __init__(self) -> None:
        self.last_hands: list[list[object]] = []
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(2)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._over.wait(0.01):
            while self.last_hands:
                self.last_hands.pop().clear()
            gc.collect()


def main(clients: int, url: str) -> None:
    application = QApplication(["garbage"])
    application.setQuitOnLastWindowClosed(False)
    gc.disable()
    collectors = Collectors()
    settings = build({"url": url})
    for number in range(clients):
        with played() as broker:
            come_and_go(application, broker, collectors, number)
        if number % 10 == 0:
            desk = DesktopApp(settings)
            desk.me = desk  # type: ignore[attr-defined]
            if number % 20:
                desk.close()
            del desk
    deadline_s = time.monotonic() + TIMEOUT_S
    while left() and time.monotonic() < deadline_s:
        work(application)
    collectors.stop()
    print(f"{clients} came, {len(left())} threads are left, {len(boxes(application))} popups stay")


def come_and_go(application: QApplication, broker: Played, collectors: Collectors, number: int) -> None:
    """Every way to lose a client: in a cycle or not, closed or not, with a parent or in the hands of a thread."""
    parent = QObject() if number % 3 == 0 else None
    client = NotifyingClient(broker.endpoint, parent, log_errors=False)
    crashed: list[Any] = []
    absent: list[Any] = []
    client.workerCrashed.connect(lambda *said: crashed.append(said))
    client.noWorkersAvailable.connect(lambda *said: absent.append(said))
    if number % 2:
        client.me = client  # type: ignore[attr-defined]
        client.crash_popup.owner = client  # type: ignore[attr-defined]
    identity = broker.admit()
    client.submit("echo", b"x")
    broker.say(identity, b"", b"MDPC01", CRASHED, notice(), notice())
    broker.say(identity, b"", b"MDPC01", ABSENT, notice(error="NO_WORKERS"))
    deadline_s = time.monotonic() + TIMEOUT_S
    while not (len(crashed) == 2 and absent):
        assert time.monotonic() < deadline_s
        work(application)
    # More is on its way when it goes.
    broker.say(identity, b"", b"MDPC01", CRASHED, notice(), notice())
    if number % 4 < 2:
        client.crash_popup.close()
    client.absence_popup.close()
    if number % 5:
        client.close()
    if number % 7 == 0:
        collectors.last_hands.append([client])
    if parent is not None:
        parent.deleteLater()
    del client, parent
    work(application)


def work(application: QApplication) -> None:
    application.processEvents()
    application.sendPostedEvents(None, QEvent.Type.DeferredDelete.value)


def left() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("unstuck")]


def boxes(application: QApplication) -> list[Any]:
    return [widget for widget in application.topLevelWidgets() if widget.isVisible()]


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
