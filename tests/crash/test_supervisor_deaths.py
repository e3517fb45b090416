"""`unstuck up`: its workers are killed, it is told to stop, it is killed itself."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.crash.conftest import MakeFleet
from tests.fleet import ROOT, TASKS, Fleet, wait_for

from unstuck.domain.liveness import Detector
from unstuck.domain.states import JobState, WorkerState
from unstuck.store.records import WorkerRecord
from unstuck.worker.signals import TOGETHER_S


class Up:
    """One `unstuck up` in a session of its own, as under a terminal."""

    def __init__(self, fleet: Fleet, workers: int) -> None:
        self.fleet = fleet
        self.workers = workers
        self.log = fleet.folder / "up.log"
        with self.log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "unstuck.cli.main", "up", TASKS, "--workers", str(workers)],
                cwd=ROOT,
                env={**os.environ, "UNSTUCK_URL": fleet.url, **fleet.environment},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.wait_for_workers()

    def active(self) -> list[WorkerRecord]:
        return [worker for worker in self.fleet.ledger.workers() if worker.state is WorkerState.ACTIVE]

    def wait_for_workers(self) -> list[WorkerRecord]:
        def all_there() -> list[WorkerRecord]:
            assert self.process.poll() is None, self.log.read_text()
            found = self.active()
            return found if len(found) == self.workers else []

        return wait_for(all_there, f"{self.workers} supervised workers")

    def close(self) -> None:
        family = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        for process in family:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass
        self.process.kill()
        self.process.wait(10)


@pytest.fixture
def started() -> Iterator[list[Up]]:
    ups: list[Up] = []
    yield ups
    for up in ups:
        up.close()


def start(started: list[Up], fleet: Fleet, workers: int = 1) -> Up:
    started.append(Up(fleet, workers))
    return started[-1]


def test_a_killed_worker_is_buried_by_its_supervisor_and_replaced(fleet: Fleet, started: list[Up]) -> None:
    up = start(started, fleet)
    [victim] = up.active()
    fails, _ = fleet.begin("nap", 600.0)
    killed_s = time.monotonic()
    os.kill(victim.pid, signal.SIGKILL)
    settled_s = fleet.wait_final(fails)
    assert settled_s - killed_s < 20.0, "by the lease alone it would take half a minute"
    record = fleet.ledger.job(fails.id)
    assert record is not None
    assert record.error is not None
    assert record.error.code == "WORKER_CRASHED"
    assert record.error.cause is not None
    saw = (
        r"its supervisor saw it end: killed by SIGKILL \(signal 9\) after \S+; "
        r"peak memory \d+ MB, CPU \S+ \(supervisor\)$"
    )
    assert re.search(saw, record.error.cause), record.error.cause
    dead = next(worker for worker in fleet.ledger.workers() if worker.id == victim.id)
    assert dead.verdict is not None
    assert (dead.verdict.detector, dead.verdict.by) == (Detector.SUPERVISOR, "supervisor")
    assert dead.verdict.autopsy is not None
    assert (dead.verdict.autopsy.signal, dead.verdict.autopsy.pid) == ("SIGKILL", victim.pid)
    [replacement] = up.wait_for_workers()
    assert replacement.id != victim.id
    assert fleet.task("add").enqueue(1, 2).result(timeout=30) == 3


def test_how_a_worker_ended_is_known_also_where_a_neighbour_saw_it_first(fleet: Fleet, started: list[Up]) -> None:
    up = start(started, fleet)
    fleet.start("--queues", "other")
    [victim] = [worker for worker in up.active() if "other" not in worker.queues or len(worker.queues) > 1]
    os.kill(victim.pid, signal.SIGKILL)

    def explained() -> bool:
        dead = next(worker for worker in fleet.ledger.workers() if worker.id == victim.id)
        autopsy = None if dead.verdict is None else dead.verdict.autopsy
        return autopsy is not None and autopsy.signal == "SIGKILL" and (autopsy.max_memory_bytes or 0) > 1_000_000

    wait_for(explained, "the supervisor's word on how it ended")


def test_a_job_that_may_be_retried_is_finished_by_the_replacement(fleet: Fleet, started: list[Up]) -> None:
    up = start(started, fleet)
    [victim] = up.active()
    job, _ = fleet.begin("nap_once_then_quick", 600.0)
    os.kill(victim.pid, signal.SIGKILL)
    job.result(timeout=30)
    assert fleet.state(job) is JobState.SUCCEEDED


def test_sigterm_drains_everybody_and_ends_in_order(make_fleet: MakeFleet, tmp_path: Path, started: list[Up]) -> None:
    fleet = make_fleet()
    up = start(started, fleet, workers=2)
    job, _ = fleet.begin("nap", 1.0)
    # Several may pass on the same wish, each in its own way: none of them means to hurry.
    for _ in range(3):
        up.process.send_signal(signal.SIGTERM)
        time.sleep(0.02)  # The kernel makes one of signals that come closer together.
    assert up.process.wait(30) == 0, up.log.read_text()
    assert fleet.state(job) is JobState.SUCCEEDED
    assert {worker.state for worker in fleet.ledger.workers()} == {WorkerState.STOPPED}
    assert "Received shutdown signal, gracefully exiting..." in up.log.read_text()


def test_ctrl_c_at_the_terminal_reaches_each_worker_once(fleet: Fleet, started: list[Up]) -> None:
    up = start(started, fleet)
    job, _ = fleet.begin("nap", 1.5)
    # A terminal signals the whole foreground group; a worker that got it twice would hurry and kill the job.
    os.killpg(up.process.pid, signal.SIGINT)
    assert up.process.wait(30) == 0, up.log.read_text()
    assert fleet.state(job) is JobState.SUCCEEDED


def test_a_second_signal_hurries(fleet: Fleet, started: list[Up]) -> None:
    up = start(started, fleet)
    job, _ = fleet.begin("nap_again", 600.0)
    up.process.send_signal(signal.SIGTERM)
    wait_for(lambda: "gracefully exiting" in up.log.read_text(), "the first signal heard")
    time.sleep(TOGETHER_S)  # Sooner it would be the same wish, passed on by somebody else.
    up.process.send_signal(signal.SIGTERM)
    assert up.process.wait(30) == 0, up.log.read_text()
    wait_for(lambda: fleet.state(job) is JobState.PENDING, "the job given back")
    record = fleet.ledger.job(job.id)
    assert record is not None
    assert record.crash_count == 0


def test_when_the_supervisor_is_killed_its_workers_drain(fleet: Fleet, started: list[Up]) -> None:
    up = start(started, fleet, workers=2)
    job, _ = fleet.begin("nap", 1.0)
    pids = [worker.pid for worker in up.active()]
    os.kill(up.process.pid, signal.SIGKILL)
    up.process.wait(10)
    wait_for(
        lambda: {worker.state for worker in fleet.ledger.workers()} == {WorkerState.STOPPED}, "both workers drained"
    )
    assert fleet.state(job) is JobState.SUCCEEDED, (fleet.ledger.job(job.id), up.log.read_text())
    wait_for(lambda: not any(psutil.pid_exists(pid) for pid in pids), "both processes gone")
