"""A job takes all it can get: processes, memory, descriptors. It ends, and nobody else does."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.crash.conftest import MakeFleet
from tests.fleet import Fleet, WorkerProcess, wait_for

from unstuck import OutOfMemory, WorkerCrashed
from unstuck.domain.autopsy import DeathKind
from unstuck.runner import cgroups

MOST = 60
BOMB = 300
BOMB_S = 30
CGROUP_MB = 320
FEAST_MB = 600
MB = 1 << 20


def of_the_fleet(fleet: Fleet) -> set[int]:
    """Everybody who was started by the workers of this fleet, however far away: the environment tells."""
    found = set()
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("UNSTUCK_URL") == fleet.url:
                found.add(process.pid)
        except psutil.Error:
            continue
    return found


def test_a_fork_bomb_is_ended_and_nothing_of_it_survives(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(max_processes=MOST)
    worker = fleet.start("--concurrency", "2")
    sibling, _ = fleet.begin("nap", 3)
    began_s = time.monotonic()
    bomb = fleet.task("fork_bomb").enqueue(BOMB, BOMB_S)
    with pytest.raises(WorkerCrashed) as caught:
        bomb.result(timeout=BOMB_S - 5)
    assert time.monotonic() - began_s < BOMB_S - 5
    assert caught.value.code == "WORKER_CRASHED"
    assert str(caught.value.cause) == f"killed by SIGKILL (signal 9): it started more than {MOST} processes"
    [attempt] = fleet.ledger.attempts(bomb.id)
    assert attempt.autopsy is not None
    assert attempt.autopsy.kind is DeathKind.PROCESS_LIMIT
    wait_for(lambda: of_the_fleet(fleet) <= {process.pid for process in worker.family()}, "the crowd to be gone", 10)
    assert sibling.result(timeout=30) == "rested"
    assert fleet.task("add").enqueue(1, 2).result(timeout=30) == 3
    assert worker.process.poll() is None


# Memory ---------------------------------------------------------------------------------------


@pytest.fixture
def memory_cgroup() -> Iterator[Path]:
    """A memory cgroup of version 1 below our own, with little memory."""
    own = cgroups.own("memory")
    if own is None or os.geteuid():
        pytest.skip("needs root and the version 1 tree of the memory controller")
    group = own / f"unstuck-test-{os.getpid()}-{time.monotonic_ns()}"
    if not cgroups.make(group):
        pytest.skip(f"{own} may not be divided")
    (group / "memory.limit_in_bytes").write_text(str(CGROUP_MB * MB))
    yield group
    wait_for(lambda: cgroups.remove(group), "the cgroup to be empty")


def started_in(group: Path, fleet: Fleet) -> WorkerProcess:
    worker = fleet.start("--concurrency", "2", wait=False)
    assert cgroups.enter(group, worker.pid), "moved long before it starts its nursery"
    fleet.wait_active(worker)
    return worker


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
        assert "where only a runner can have been it" in cause, cause
        assert f"its cgroup may hold {CGROUP_MB} MB and once held {CGROUP_MB} MB" in cause
        [attempt] = fleet.ledger.attempts(feast.id)
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
