"""A worker lives and beats, but a loop of its own hangs: its watchdog ends it, and somebody else takes over."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.crash.conftest import MakeFleet
from tests.support.fleet import ROOT, TASKS, Fleet, wait_for
from tests.support.signals import OwnProcess, send_signal

from unstuck.domain.liveness import Detector
from unstuck.domain.states import JobState, WorkerState
from unstuck.ledger.contract.workers import WorkerRecord
from unstuck.worker.exit_status import WATCHDOG_EXIT

TIGHT = {"heartbeat_interval": "0.5s", "heartbeat_timeout": "2s", "check_interval": "0.25s", "poll_interval": "0.2s"}
PATIENT = {**TIGHT, "claimed_stale_after": "60s", "running_stale_after": "60s"}
"""The watchdog's own limit is as short as it can be, and no worker is declared dead for its silence."""
HANGS = ("loop.step", "ledger_thread.turn")
HANG = "hang"
"""The file that makes the worker hang: as soon as its job has begun, however long that took."""


@pytest.fixture
def up(make_fleet: MakeFleet, request: pytest.FixtureRequest) -> Iterator[tuple[Fleet, Path]]:
    fleet = make_fleet(**PATIENT)
    log = fleet.folder / "up.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "unstuck.cli.main", "up", TASKS, "--concurrency", "1"],
            cwd=ROOT,
            env={
                **os.environ,
                "UNSTUCK_URL": fleet.url,
                **fleet.environment,
                "UNSTUCK_FAILPOINTS": f"{request.param}=hang_if:{fleet.folder / HANG}",
            },
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    yield fleet, log
    family = OwnProcess(process.pid).children(recursive=True)
    process.kill()
    process.wait(10)
    for child in family:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            pass


@pytest.mark.parametrize("up", HANGS, indirect=True)
def test_a_worker_whose_loop_hangs_is_ended_by_its_own_watchdog_and_replaced(up: tuple[Fleet, Path]) -> None:
    fleet, log = up
    job, _ = fleet.begin("nap", 600.0)
    [held_by] = [attempt.worker_id for attempt in fleet.ledger.jobs.attempts(job.id)]
    (fleet.folder / HANG).touch()

    def dead() -> WorkerRecord | None:
        return next((worker for worker in fleet.ledger.workers.list() if worker.state is WorkerState.DEAD), None)

    victim = wait_for(dead, "the verdict on the worker that hangs")
    (fleet.folder / HANG).unlink()
    assert victim.id == held_by
    assert victim.verdict is not None
    assert (victim.verdict.detector, victim.verdict.by) == (Detector.WATCHDOG, victim.id), victim.verdict
    assert victim.verdict.evidence.startswith("alive but doing nothing: its ")
    fleet.wait_state(job, JobState.FAILED)
    record = fleet.ledger.jobs.get(job.id)
    assert record is not None
    assert record.error is not None
    assert record.error.code == "WORKER_CRASHED"
    # What people see, without knowing where to look.
    listed = subprocess.run(
        [sys.executable, "-m", "unstuck.cli.main", "--url", fleet.url, "workers"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    assert "watchdog: alive but doing nothing" in listed
    said = wait_for(
        lambda: log.read_text() if "Worker process died" in log.read_text() else "", "the supervisor's word"
    )
    assert "This worker is ended by its own watchdog" in said
    assert f"exited with code {WATCHDOG_EXIT}" in said
    assert 'File "' in said, "no stacks"
    wait_for(
        lambda: any(
            worker.state is WorkerState.ACTIVE and worker.id != victim.id for worker in fleet.ledger.workers.list()
        ),
        "a replacement",
    )


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_a_worker_that_was_stopped_for_long_is_not_taken_for_hung(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(**{**TIGHT, "evidence": "none"})
    worker = fleet.start("--concurrency", "1")
    before = worker.id
    # At rest: one that is frozen with the write lock of SQLite in its hands is ended for that.
    assert fleet.task("add").enqueue(1, 1).result(timeout=30) == 2
    wait_for(lambda: not fleet.ledger.workers.held(before), "it to hold nothing")
    worker.freeze(alone=True)
    # Another one declares it dead for its silence; the time itself must be longer than the watchdog's own limit.
    other = fleet.start("--concurrency", "1")
    wait_for(lambda: fleet_silence(fleet, before) > 8.0, "a long silence")
    send_signal(worker.pid, signal.SIGCONT)
    wait_for(lambda: worker.process.poll() is not None or worker.id != before, "the one that was stopped to come back")
    assert worker.process.poll() is None, worker.said()
    other.stop()
    assert fleet.task("add").enqueue(1, 2).result(timeout=30) == 3


def fleet_silence(fleet: Fleet, worker_id: str) -> float:
    return next(worker.silent_s for worker in fleet.ledger.workers.list() if worker.id == worker_id)
