"""Clients with a screen: deaths become signals in the thread that draws, and popups that hold up nothing."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cbor2
import pytest
from tests.desktop.screen import QMessageBox, Screen
from tests.mdp.broker import BrokerHarness, Played, notice, played
from tests.support.fleet import TIMEOUT_S
from tests.support.signals import send_signal

from unstuck.desktop.app import DesktopApp
from unstuck.errors import CallFailed
from unstuck.mdp.qt import NotifyingClient

PATIENT_S = 60.0
RETRIED = "Worker processing your job has crashed. Job will be retried."


@pytest.fixture
def broker() -> Iterator[Played]:
    with played() as broker:
        yield broker


class Room:
    """A client with all that it emitted, and the broker that it talks to."""

    def __init__(self, screen: Screen, broker: Played, client: NotifyingClient) -> None:
        self.screen, self.broker, self.client = screen, broker, client
        self.crashed: list[tuple[str, str]] = []
        self.absent: list[tuple[str, str]] = []
        self.threads: set[int] = set()
        client.workerCrashed.connect(lambda *said: self._note(self.crashed, said))
        client.noWorkersAvailable.connect(lambda *said: self._note(self.absent, said))
        self.identity = broker.admit()

    def _note(self, where: list[tuple[str, str]], said: tuple[str, ...]) -> None:
        self.threads.add(threading.get_ident())
        where.append((said[0], said[1]))

    def tell(self, *maps: bytes, command: bytes = b"\x08") -> None:
        self.broker.say(self.identity, b"", b"MDPC01", command, *maps)


def room_of(screen: Screen, broker: Played, **settings: Any) -> Room:
    return Room(screen, broker, NotifyingClient(broker.endpoint, timeout=PATIENT_S, **settings))


@pytest.fixture
def room(screen: Screen, broker: Played) -> Iterator[Room]:
    room = room_of(screen, broker)
    yield room
    room.client.close()


def test_a_crash_is_a_signal_and_a_warning_that_blocks_nothing(room: Room) -> None:
    room.tell(notice(service="resize", message=RETRIED))
    [box] = room.screen.wait_for(room.screen.dialogs, "a popup")
    assert room.crashed == [("resize", RETRIED)]
    assert room.threads == {threading.get_ident()}
    assert (box.windowTitle(), box.icon()) == ("Worker Crashed", QMessageBox.Icon.Warning)
    assert box.text() == (
        f"A worker processing job 'resize' has crashed.\n\n{RETRIED}\n\nThe job will be automatically retried."
    )
    assert not box.isModal()
    # The popup is open, and the next call is answered and told all the same.
    ended: list[Any] = []
    room.client.callEnded.connect(ended.append)
    call = room.client.submit("echo", b"x")
    identity, correlation, rest = room.broker.request()
    room.broker.say(identity, correlation, b"", b"MDPC01", *rest)
    room.screen.wait_for(lambda: ended, "the end of the call")
    assert ended == [call]
    assert call.result() == [b"x"]
    assert room.client.status


def test_a_popup_is_gone_when_it_is_closed_and_the_next_begins_to_count_anew(room: Room) -> None:
    gone: list[bool] = []
    for _ in range(2):
        room.tell(notice(service="resize"))
        [box] = room.screen.wait_for(room.screen.dialogs, "a popup")
        assert "A worker processing job 'resize'" in box.text()
        box.destroyed.connect(lambda: gone.append(True))
        count = len(gone)
        box.button(QMessageBox.StandardButton.Ok).click()
        room.screen.wait_for(lambda before=count: len(gone) > before, "the popup deleted")  # type: ignore[misc]
        assert room.client.crash_popup.box is None


def test_a_mass_crash_is_one_dialog_with_numbers(room: Room) -> None:
    room.tell(notice(service="resize"))
    for _ in range(30):
        room.tell(*(notice(service="mail") for _ in range(10)))
    room.tell(notice(service="mail", suppressed=99, final=True))
    room.screen.wait_for(lambda: len(room.crashed) == 302, "everything told")
    box = room.client.crash_popup.box
    assert box is not None
    room.screen.wait_for(lambda: "401 times" in box.text(), "all of them counted")
    assert "'mail' (400), 'resize' (1)" in box.text()
    assert "1 of them will not be retried" in box.text()
    assert room.screen.dialogs() == [box]


def test_nobody_there_is_a_critical_popup_beside_that_of_a_crash(room: Room) -> None:
    message = "No workers are currently available to process this job."
    room.tell(notice(error="NO_WORKERS", service="PluginX", message=message), command=b"\x09")
    room.tell(notice())
    room.screen.wait_for(lambda: len(room.screen.dialogs()) == 2, "two popups")
    assert room.absent == [("PluginX", message)]
    box = room.client.absence_popup.box
    assert box is not None
    assert (box.windowTitle(), box.icon()) == ("No Workers Available", QMessageBox.Icon.Critical)
    assert box.text().endswith("Please start worker servers and try again.")


def test_the_last_word_on_a_request_promises_no_retry_and_ends_its_call(room: Room) -> None:
    ended: list[Any] = []
    room.client.callEnded.connect(ended.append)
    call = room.client.submit("resize", b"x")
    identity, correlation, _ = room.broker.request()
    last = notice(service="resize", message="It crashed 4 times.", final=True)
    room.broker.say(identity, correlation, b"", b"MDPC01", b"\x08", last)
    [box] = room.screen.wait_for(room.screen.dialogs, "a popup")
    assert box.text().endswith("The job will not be retried.")
    room.screen.wait_for(lambda: ended, "the end of the call")
    with pytest.raises(CallFailed, match="4 times"):
        call.result()


def test_markup_in_a_message_is_no_markup(room: Room) -> None:
    room.tell(notice(message="<h1>Click</h1> <a href='http://evil'>here</a>"))
    [box] = room.screen.wait_for(room.screen.dialogs, "a popup")
    assert box.textFormat().name == "PlainText"


def test_without_popups_and_logs_there_are_still_signals(
    screen: Screen, broker: Played, caplog: pytest.LogCaptureFixture
) -> None:
    room = room_of(screen, broker, show_popups=False, log_errors=False)
    room.tell(notice())
    screen.wait_for(lambda: room.crashed, "the signal")
    assert screen.dialogs() == []
    assert caplog.records == []
    room.client.show_popups = room.client.log_errors = True
    room.tell(notice(message="now look"))
    screen.wait_for(screen.dialogs, "a popup")
    assert "echo: now look" in caplog.text
    room.client.close()


def test_who_wants_no_notifications_asks_for_none(screen: Screen, broker: Played) -> None:
    client = NotifyingClient(broker.endpoint, enable_notifications=False)
    *_, wish = broker.hear()
    assert cbor2.loads(wish)["events"] == []
    client.close()


def test_a_handler_of_ones_own_runs_where_widgets_may_be_touched(screen: Screen, broker: Played) -> None:
    class Mine(NotifyingClient):
        def handle_error_notification(self, error: dict[str, Any]) -> None:
            heard.append((error["error"], threading.get_ident()))

    heard: list[tuple[str, int]] = []
    room = Room(screen, broker, Mine(broker.endpoint, timeout=PATIENT_S))
    room.tell(notice())
    screen.wait_for(lambda: heard, "the handler")
    assert heard == [("WORKER_CRASHED", threading.get_ident())]
    assert screen.dialogs() == []
    assert room.crashed == []
    room.client.close()


def test_what_comes_when_a_client_was_closed_is_told_to_nobody(room: Room) -> None:
    heard: list[Any] = []
    handed_over = threading.Event()
    hand_over = room.client.client.handle_error_notification

    def note(error: dict[str, Any]) -> None:
        hand_over(error)
        heard.append(error)
        handed_over.set()

    room.client.client.handle_error_notification = note  # type: ignore[method-assign]
    room.tell(notice())
    # It is on its way to our thread, which does not look yet.
    assert handed_over.wait(PATIENT_S)
    room.client.close()
    for _ in range(5):
        room.screen.work()
    assert room.crashed == []
    assert room.screen.dialogs() == []


def test_without_a_qapplication_a_popup_is_logged_and_the_process_lives() -> None:
    code = """
import sys
from PySide6.QtCore import QCoreApplication, QTimer
from tests.mdp.broker import notice, played
from unstuck.mdp.qt import NotifyingClient

application = QCoreApplication([])
with played() as broker:
    client = NotifyingClient(broker.endpoint)
    identity = broker.admit()
    client.workerCrashed.connect(lambda *said: (print(*said), QTimer.singleShot(0, application.quit)))
    broker.say(identity, b"", b"MDPC01", b"\\x08", notice())
    application.exec()
    client.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENT_S, env=os.environ, check=False
    )
    assert (done.returncode, done.stdout) == (0, "echo died\n"), done.stderr
    assert "there is no QApplication" in done.stderr


def test_nobody_is_there_then_a_worker_dies_then_another_does_it(
    screen: Screen, scene: BrokerHarness, tmp_path: Path
) -> None:
    desk = DesktopApp(scene.fleet.app.settings)
    client = NotifyingClient(scene.endpoint, timeout=TIMEOUT_S, log_errors=False)
    ended: list[Any] = []
    client.callEnded.connect(ended.append)
    followed: list[bool] = []
    desk.following_began.connect(lambda: followed.append(True))
    try:
        screen.wait_for(lambda: followed, "the ledger followed")
        call = client.submit("echo", f"job 0 {tmp_path / 'gate'}".encode())
        nobody = screen.wait_for(lambda: client.absence_popup.box, "the popup that nobody is there")
        assert nobody.text() == (
            "No workers are available to process job 'echo'.\n\n"
            "No workers are currently available to process this job.\n\n"
            "Please start worker servers and try again."
        )
        nobody.button(QMessageBox.StandardButton.Ok).click()
        screen.wait_for(lambda: desk.unserved_popup.box, "the same on the desktop")

        scene.worker("echo")
        send_signal(scene.wait_begun("job").pid, signal.SIGKILL)
        crashed = screen.wait_for(lambda: client.crash_popup.box, "the popup of the crash")
        assert crashed.text() == (
            "A worker processing job 'echo' has crashed.\n\n"
            "Worker processing your job has crashed. Job will be retried.\n\n"
            "The job will be automatically retried."
        )
        died = screen.wait_for(lambda: desk.death_popup.box, "the death on the desktop")
        screen.wait_for(lambda: "1 queued again" in died.text(), "what became of the job")

        (tmp_path / "gate").touch()
        scene.worker("echo")
        screen.wait_for(lambda: ended, "the reply")
        assert call.result() == [b"done job"]
        assert client.absence_popup.box is None, "it was closed, and nothing new was said"
    finally:
        client.close()
        desk.close()
