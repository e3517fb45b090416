"""`unstuck up` and `unstuck worker` as a service: under systemd's protocol, and as process 1 of a container."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.support.fleet import ROOT, wait_for
from tests.support.signals import OwnProcess

from unstuck.config import Settings
from unstuck.domain.states import WorkerState
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.workers import WorkerRecord
from unstuck.ledger.open import ready_ledger

# An app that writes down at its import what it can see of systemd's variables.
APP = """
import os, pathlib
from unstuck import App

with pathlib.Path(__file__).with_name("seen").open("a") as seen:
    seen.write(repr([n for n in os.environ if n.startswith(("NOTIFY_", "WATCHDOG_"))]) + "\\n")
app = App()
"""


class Service:
    """A command of ours on a SQLite ledger in a folder, with somebody who listens as systemd does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "service_app.py").write_text(APP)
        self.url = f"sqlite:///{folder}/jobs.db"
        self.ledger: Ledger = ready_ledger(Settings(url=self.url))
        self.log = folder / "service.log"
        self.heard: list[str] = []
        self._ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._ear.bind(str(folder / "notify"))
        self._ear.setblocking(False)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *arguments: str, before: tuple[str, ...] = (), **environment: str) -> "subprocess.Popen[bytes]":
        with self.log.open("wb") as file:
            self.process = subprocess.Popen(
                [*before, sys.executable, "-m", "unstuck.cli.main", *arguments],
                cwd=self.folder,
                env={**os.environ, "UNSTUCK_URL": self.url, "PYTHONPATH": f"{self.folder}:{ROOT}", **environment},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        return self.process

    def listen(self) -> list[str]:
        assert self.process is not None
        try:
            while True:
                self.heard += self._ear.recv(4096).decode().splitlines()
        except BlockingIOError:
            return self.heard

    def wait_heard(self, line: str) -> None:
        wait_for(lambda: line in self.listen(), f"{line!r} to be heard")

    def active(self) -> list[WorkerRecord]:
        return [worker for worker in self.ledger.workers.list() if worker.state is WorkerState.ACTIVE]

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            for child in OwnProcess(self.process.pid).children(recursive=True):
                try:
                    child.kill()
                except psutil.NoSuchProcess:
                    pass
            self.process.kill()
            self.process.wait(10)
        self._ear.close()
        self.ledger.close()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    made = Service(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("command", ["up", "worker"])
def test_systemd_is_told_when_it_is_ready_alive_and_stopping(service: Service, command: str) -> None:
    address = str(service.folder / "notify")
    process = service.start(command, "service_app:app", NOTIFY_SOCKET=address, WATCHDOG_USEC="400000")
    service.wait_heard("READY=1")
    # Not before: whoever waits for the start may send jobs now.
    assert len(service.active()) == 1, service.log.read_text()
    assert "WATCHDOG=1" not in service.heard[: service.heard.index("READY=1")] or command == "up"
    if command == "up":
        service.wait_heard("STATUS=1 of 1 workers alive")
    already = service.listen().count("WATCHDOG=1")
    wait_for(lambda: service.listen().count("WATCHDOG=1") >= already + 2, "signs of life")
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0, service.log.read_text()
    assert "STOPPING=1" in service.listen()
    # Neither the import for the settings nor the fork server's saw the variables.
    seen = (service.folder / "seen").read_text().splitlines()
    assert len(seen) >= 1
    assert set(seen) == {"[]"}


def test_a_frozen_supervisor_gives_no_sign_of_life(service: Service) -> None:
    address = str(service.folder / "notify")
    process = service.start("up", "service_app:app", NOTIFY_SOCKET=address, WATCHDOG_USEC="400000")
    service.wait_heard("READY=1")
    # Its worker lives on; it has no right to speak for the supervisor, and does not know the address.
    process.send_signal(signal.SIGSTOP)
    wait_for(lambda: OwnProcess(process.pid).status() == psutil.STATUS_STOPPED, "the freeze")
    service.listen().clear()
    beat = service.active()[0].last_seen_at
    wait_for(lambda: service.active() and service.active()[0].last_seen_at > beat, "a beat of its worker")
    assert service.listen() == []
    process.send_signal(signal.SIGCONT)
    service.wait_heard("WATCHDOG=1")


def test_a_hangup_ends_everybody_in_order(service: Service) -> None:
    process = service.start("up", "service_app:app", "--workers", "2")
    wait_for(lambda: len(service.active()) == 2, "two workers")
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGHUP)
    assert process.wait(30) == 0, service.log.read_text()
    assert {worker.state for worker in service.ledger.workers.list()} == {WorkerState.STOPPED}
    assert "hurrying" not in service.log.read_text()


def test_the_stacks_of_a_living_fleet_can_be_asked_for(service: Service) -> None:
    process = service.start("up", "service_app:app", NOTIFY_SOCKET=str(service.folder / "notify"))
    service.wait_heard("READY=1")
    process.send_signal(signal.SIGUSR1)
    wait_for(lambda: "supervisor.py" in service.log.read_text(), "the supervisor's stacks")
    wait_for(lambda: "loop.py" in service.log.read_text(), "the stack of the worker's main thread")
    wait_for(lambda: "heartbeat.py" in service.log.read_text(), "the stacks of its other threads")
    assert len(service.active()) == 1
    assert process.poll() is None


def can_unshare() -> bool:
    command = ["unshare", "--pid", "--fork", "--mount-proc", "true"]
    return (
        bool(shutil.which("unshare") and shutil.which("nsenter"))
        and not subprocess.run(command, capture_output=True, check=False).returncode
    )


def test_as_process_1_it_reaps_orphans_replaces_the_dead_and_heeds_sigterm(service: Service) -> None:
    if not can_unshare():
        pytest.skip("this user may not make a pid namespace (needs unshare, nsenter and CAP_SYS_ADMIN)")
    outside = service.start("up", "service_app:app", before=("unshare", "--pid", "--fork", "--mount-proc"))
    wait_for(lambda: service.active(), "a worker in the namespace")
    [first] = OwnProcess(outside.pid).children()
    assert Path(f"/proc/{first.pid}/status").read_text().partition("NSpid:")[2].split()[1] == "1"
    # An orphan of somebody else, as `docker exec` leaves them: nobody but process 1 can bury it.
    enter = ["nsenter", "--target", str(first.pid), "--pid", "--mount", "sh", "-c"]
    subprocess.run([*enter, "sleep 600 & sleep 0 & exit 0"], check=True, timeout=30, stdout=subprocess.DEVNULL)

    def only_the_worker() -> bool:
        children = first.children()
        return len(children) == 1 and children[0].name() != "sleep"

    wait_for(only_the_worker, "the orphans ended and reaped")
    [victim] = service.active()
    [worker] = first.children()
    worker.kill()
    wait_for(lambda: [found for found in service.active() if found.id != victim.id], "a replacement")
    dead = next(found for found in service.ledger.workers.list() if found.id == victim.id)
    assert dead.verdict is not None
    assert "its supervisor saw it end: killed by SIGKILL (signal 9)" in dead.verdict.evidence
    wait_for(lambda: not [child for child in first.children() if child.status() == psutil.STATUS_ZOMBIE], "no zombies")
    alive = subprocess.run(
        [*enter, f"exec {sys.executable} -m unstuck.cli.main --url {service.url} alive"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
    )
    assert (alive.returncode, "1 worker alive" in alive.stdout) == (0, True), alive
    first.send_signal(signal.SIGTERM)
    assert outside.wait(30) == 0, service.log.read_text()
    assert [found.state for found in service.ledger.workers.list() if found.id != victim.id] == [WorkerState.STOPPED]
    # Seen from here the namespace is another world: its workers are not ours.
    seen = subprocess.run(
        [sys.executable, "-m", "unstuck.cli.main", "--url", service.url, "alive"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
    )
    assert seen.returncode == 1
    assert "No worker on" in seen.stdout
