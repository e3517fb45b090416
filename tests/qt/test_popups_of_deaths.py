"""Popups from end to end: a real broker, a real worker that is killed, a client with a screen, and the desktop."""

import os
import signal
from pathlib import Path
from typing import Any

from tests.fleet import PATIENCE_S
from tests.mdp.scene import Scene
from tests.qt.screen import QMessageBox, Screen

from unstuck.desktop.desk import Desk
from unstuck.mdp.qt import NotifyingClient


def test_nobody_is_there_then_a_worker_dies_then_another_does_it(screen: Screen, scene: Scene, tmp_path: Path) -> None:
    desk = Desk(scene.fleet.app.settings)
    client = NotifyingClient(scene.endpoint, timeout=PATIENCE_S, log_errors=False)
    ended: list[Any] = []
    client.callEnded.connect(ended.append)
    try:
        screen.wait_for(lambda: desk.window.state.text().startswith("Following"), "the ledger followed")
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
        os.kill(scene.wait_begun("job").pid, signal.SIGKILL)
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
