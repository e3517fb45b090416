"""A process is frozen at the wrong moment and wakes late."""

import os
import signal
import time
from pathlib import Path

import pytest
from tests.crash.conftest import MakeFleet
from tests.fleet import Fleet, wait_for

from unstuck.domain.states import AttemptState, JobState, WorkerState

TIGHT = {"heartbeat_interval": "0.5s", "heartbeat_timeout": "2s", "check_interval": "0.25s", "evidence": "none"}


def test_a_frozen_worker_wakes_late_and_its_result_is_refused(make_fleet: MakeFleet, tmp_path: Path) -> None:
    fleet = make_fleet(**TIGHT)
    frozen = fleet.start("--concurrency", "1")
    frozen_id = frozen.id
    notes = tmp_path / "notes"
    job = fleet.task("nap_once_then_quick").enqueue(3.0, str(notes))
    wait_for(notes.exists, "the first attempt to begin")
    runners = [process.pid for process in frozen.runners()]
    frozen.freeze()
    fleet.start("--concurrency", "1")
    assert job.result(timeout=30) == "quick"
    frozen.signal_family(signal.SIGCONT)

    def reborn() -> bool:
        record = frozen.record()
        return record is not None and record.id != frozen_id and record.state is WorkerState.ACTIVE

    wait_for(reborn, "the thawed worker to come back under a new id")
    wait_for(lambda: not any(_alive(pid) for pid in runners), "its old runners to be killed")
    assert fleet.state(job) is JobState.SUCCEEDED
    attempts = fleet.ledger.attempts(job.id)
    assert [attempt.state for attempt in attempts].count(AttemptState.SUCCEEDED) == 1
    assert attempts[0].worker_id == frozen_id
    assert attempts[0].state is AttemptState.CRASHED
    old = next(worker for worker in fleet.ledger.workers() if worker.id == frozen_id)
    assert old.state is WorkerState.DEAD
    # The one that came back works like any other.
    fleet.workers[-1].stop()
    assert fleet.task("add").enqueue(1, 2).result(timeout=30) == 3


def test_only_the_worker_is_frozen_and_the_nursery_ends_its_runners(make_fleet: MakeFleet, tmp_path: Path) -> None:
    fleet = make_fleet(**TIGHT)
    frozen = fleet.start("--concurrency", "1")
    notes = tmp_path / "notes"
    job = fleet.task("nap_once_then_quick").enqueue(60.0, str(notes))
    wait_for(notes.exists, "the first attempt to begin")
    runner = frozen.runners()[0]
    frozen.freeze(alone=True)
    fleet.start("--concurrency", "1")
    assert job.result(timeout=30) == "quick"
    # Its lease ended before the job was given away, and the nursery saw to it.
    assert not _alive(runner.pid)
    os.kill(frozen.pid, signal.SIGCONT)


def test_a_worker_frozen_inside_a_write_does_not_stop_the_others(make_fleet: MakeFleet, url: str) -> None:
    point = "sqlite.inside_write=stop:5" if url.startswith("sqlite") else "turn.before_commit=stop:5"
    fleet = make_fleet(heartbeat_interval="0.5s", heartbeat_timeout="4s", check_interval="0.25s")
    frozen = fleet.start(wait=False, UNSTUCK_FAILPOINTS=point)
    wait_for(lambda: _stopped(frozen.pid), "the worker to freeze inside its write")
    # Whoever writes next waits behind it for half the timeout at the most, then goes on without it.
    healthy = fleet.start(wait=False)
    job = fleet.task("add").enqueue(1, 2)
    assert job.result(timeout=60) == 3
    assert healthy.process.poll() is None


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def _stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGSTOP], ids=["stop"])
def test_a_short_freeze_costs_nothing(fleet: Fleet, number: signal.Signals) -> None:
    worker = fleet.start("--concurrency", "1")
    job, _ = fleet.begin("nap", 0.5)
    worker.signal_family(number)
    worker.signal_family(signal.SIGCONT)
    assert job.result(timeout=30) == "rested"
    assert len(fleet.ledger.attempts(job.id)) == 1


@pytest.mark.parametrize("whole", [True, False], ids=["all", "worker"])
def test_a_worker_that_was_frozen_itself_accuses_no_job_of_silence(fleet: Fleet, whole: bool) -> None:
    worker = fleet.start("--concurrency", "2")
    # Signs every tenth of a second, for four seconds, with a stall_timeout of one.
    job = fleet.task("work_with_signs").enqueue(40)
    fleet.wait_running(job)
    wait_for(lambda: worker.runners(), "a runner")
    frozen = worker.family() if whole else worker.family()[:1]
    for process in frozen:
        process.send_signal(signal.SIGSTOP)
    time.sleep(2.5)  # The frost itself, longer than a job may be silent.
    for process in reversed(frozen):
        process.send_signal(signal.SIGCONT)
    assert job.result(timeout=30) == "done"
    assert len(fleet.ledger.attempts(job.id)) == 1
