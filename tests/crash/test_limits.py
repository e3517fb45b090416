"""A job takes all it can get: processes, output, memory. It ends, and nobody else does."""

from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from tests.crash.conftest import CGROUP_MB, MakeFleet, started_in
from tests.support.fleet import Fleet, wait_for
from tests.support.signals import OwnProcess

from unstuck import OutOfMemory, WorkerCrashed
from unstuck.domain.autopsy import DeathKind

MOST = 60
BOMB = 300
BOMB_S = 30
FEAST_MB = 600
FLOOD_MB = 100
KEPT_MB = 4
"""So much of a flood may be in memory while it lasts."""
MB = 1 << 20


def of_the_fleet(fleet: Fleet) -> set[int]:
    """Everybody who was started by the workers of this fleet, however far away: the environment tells."""
    found = set()
    url = f"UNSTUCK_URL={fleet.url}".encode()
    for pid in psutil.pids():
        with suppress(OSError):
            if url in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.add(pid)
    return found


def test_a_fork_bomb_is_ended_and_nothing_of_it_survives(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(max_processes=MOST)
    worker = fleet.start("--concurrency", "2")
    sibling, _ = fleet.begin("nap", 3)
    bomb = fleet.task("fork_bomb").enqueue(BOMB, BOMB_S)
    with pytest.raises(WorkerCrashed) as caught:
        bomb.result(timeout=BOMB_S - 5)
    assert caught.value.code == "WORKER_CRASHED"
    assert str(caught.value.cause) == f"killed by SIGKILL (signal 9): it started more than {MOST} processes"
    [attempt] = fleet.ledger.jobs.attempts(bomb.id)
    assert attempt.autopsy is not None
    assert attempt.autopsy.kind is DeathKind.PROCESS_LIMIT
    wait_for(lambda: of_the_fleet(fleet) <= {process.pid for process in worker.family()}, "the crowd to be gone", 10)
    assert sibling.result(timeout=30) == "rested"
    assert fleet.task("add").enqueue(1, 2).result(timeout=30) == 3
    assert worker.process.poll() is None


def test_a_double_forked_grandchild_dies_with_a_job_that_ends_well(fleet: Fleet, tmp_path: Path) -> None:
    worker = fleet.start("--concurrency", "2")
    sibling, _ = fleet.begin("nap", 2)
    notes = tmp_path / "grandchild"
    assert fleet.task("leave_a_grandchild").enqueue(str(notes)).result(timeout=30) == "left"
    wait_for(lambda: not psutil.pid_exists(int(notes.read_text())), "the grandchild to be gone")
    assert of_the_fleet(fleet) <= {process.pid for process in worker.family()}
    assert sibling.result(timeout=30) == "rested"
    assert worker.process.poll() is None


def test_a_double_forked_grandchild_dies_with_a_runner_that_dies(fleet: Fleet, tmp_path: Path) -> None:
    worker = fleet.start("--concurrency", "2")
    sibling, _ = fleet.begin("nap", 4)
    notes = tmp_path / "grandchild"
    job = fleet.task("leave_a_grandchild").enqueue(str(notes), "exit")
    with pytest.raises(WorkerCrashed, match="Worker died unexpectedly") as caught:
        job.result(timeout=30)
    assert caught.value.code == "WORKER_CRASHED"
    assert str(caught.value.cause) == "exited with code 3"
    [attempt] = fleet.ledger.jobs.attempts(job.id)
    assert attempt.autopsy is not None
    assert (attempt.autopsy.kind, attempt.autopsy.exit_code) == (DeathKind.EXIT, 3)
    wait_for(lambda: not psutil.pid_exists(int(notes.read_text().split()[0])), "the grandchild to be gone")
    assert of_the_fleet(fleet) <= {process.pid for process in worker.family()}
    assert sibling.result(timeout=30) == "rested"
    assert worker.process.poll() is None


# Output ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["", "abort"], ids=["ends", "dies"])
def test_a_flood_of_output_is_bounded_while_it_lasts_and_in_the_ledger(
    make_fleet: MakeFleet, tmp_path: Path, how: str
) -> None:
    limit = 10_000
    fleet = make_fleet(max_output_bytes=limit)
    worker = fleet.start("--concurrency", "2")
    sibling, _ = fleet.begin("nap", 3)
    before = OwnProcess(worker.pid).memory_info().rss
    dam = tmp_path / "dam"
    job = fleet.task("flood").enqueue(FLOOD_MB, str(dam), how)
    wait_for(lambda: dam.exists() and "\n" in dam.read_text(), "all of it to be printed")
    stdout = Path(f"/proc/{dam.read_text().split()[1]}/fd/1")
    wait_for(lambda: stdout.stat().st_blocks * 512 < KEPT_MB * MB, "what nobody will read to be thrown away")
    assert stdout.stat().st_size > FLOOD_MB * MB, "it was really printed"
    dam.unlink()
    if how:
        with pytest.raises(WorkerCrashed) as caught:
            job.result(timeout=30)
        assert caught.value.code == "WORKER_CRASHED"
        assert str(caught.value.cause) == "killed by SIGABRT (signal 6)"
        [attempt] = fleet.ledger.jobs.attempts(job.id)
        assert attempt.autopsy is not None
        assert (attempt.autopsy.kind, attempt.autopsy.signal) == (DeathKind.SIGNAL, "SIGABRT")
        assert attempt.autopsy.stdout.endswith("died of abort"), "its last words"
        assert len(attempt.autopsy.stdout) <= limit
        assert attempt.autopsy.seen_after_s is not None
        assert attempt.autopsy.seen_after_s < 30
    else:
        assert job.result(timeout=30) == "printed"
    [output] = fleet.ledger.jobs.outputs(job.id)
    assert output.stdout.startswith(b"first words\nxxx")
    assert output.stdout.endswith(b"died of abort\n" if how else b"xx\nlast words\n")
    assert b"bytes left out" in output.stdout
    assert len(output.stdout) < limit + 100
    assert OwnProcess(worker.pid).memory_info().rss - before < FLOOD_MB * MB / 4
    assert sibling.result(timeout=30) == "rested"
    assert fleet.task("add").enqueue(1, 2).result(timeout=30) == 3
    assert worker.process.poll() is None


# Memory ---------------------------------------------------------------------------------------


def test_a_job_that_eats_all_memory_is_told_from_one_that_was_killed(memory_cgroup: Path, fleet: Fleet) -> None:
    worker = started_in(memory_cgroup, fleet)
    try:
        sibling, _ = fleet.begin("nap", 2)
        feast = fleet.task("eat").enqueue(FEAST_MB)
        with pytest.raises(OutOfMemory) as caught:
            feast.result(timeout=60)
        assert caught.value.code == "OUT_OF_MEMORY"
        cause = str(caught.value.cause)
        assert cause.startswith("killed by SIGKILL (signal 9): out of memory: the kernel killed 1 process just then")
        assert "in the worker's cgroup (" in cause, cause
        assert f"its cgroup may hold {CGROUP_MB} MB and once held {CGROUP_MB} MB" in cause
        [attempt] = fleet.ledger.jobs.attempts(feast.id)
        assert attempt.autopsy is not None
        assert (attempt.autopsy.kind, attempt.autopsy.sure) == (DeathKind.OUT_OF_MEMORY, True)
        # Just after it, in the same place, and no memory was wanting.
        with pytest.raises(WorkerCrashed) as caught_plain:
            fleet.task("die").enqueue("kill").result(timeout=30)
        assert str(caught_plain.value.cause) == "killed by SIGKILL (signal 9)"
        assert sibling.result(timeout=30) == "rested"
        assert worker.process.poll() is None
    finally:
        worker.kill_family()
