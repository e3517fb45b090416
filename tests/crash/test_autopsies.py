"""Every death is explained: what killed it, its stack, its last words, its memory; told apart by evidence."""

import pytest
from tests.crash.conftest import MakeFleet
from tests.fleet import Fleet

from unstuck import WorkerCrashed
from unstuck.domain.autopsy import Autopsy, DeathKind
from unstuck.domain.liveness import Detector
from unstuck.domain.states import JobState

MOST_S = 30.0


def only_autopsy(fleet: Fleet, job_id: int) -> Autopsy:
    [attempt] = fleet.ledger.attempts(job_id)
    assert attempt.autopsy is not None
    return attempt.autopsy


WAYS = {
    "kill": (DeathKind.SIGNAL, "SIGKILL", ""),
    "exit": (DeathKind.EXIT, "code 3", ""),
    "segfault": (DeathKind.SIGNAL, "SIGSEGV", "Fatal Python error: Segmentation fault"),
    "abort": (DeathKind.SIGNAL, "SIGABRT", "Fatal Python error: Aborted"),
}


def test_every_way_of_dying_is_explained(fleet: Fleet) -> None:
    worker = fleet.start("--concurrency", "5")
    sibling, _ = fleet.begin("nap", 1.0)
    jobs = {how: fleet.task("die").enqueue(how) for how in WAYS}
    for how, (kind, words, stack) in WAYS.items():
        job = jobs[how]
        with pytest.raises(WorkerCrashed) as caught:
            job.result(timeout=MOST_S)
        assert caught.value.code == "WORKER_CRASHED"
        assert words in str(caught.value.cause)
        autopsy = only_autopsy(fleet, job.id)
        assert (autopsy.kind, autopsy.detector, autopsy.sure) == (kind, Detector.RUNNER, True)
        assert words in autopsy.summary
        assert autopsy.stack.startswith(stack)
        assert ("in end_by" in autopsy.stack) == bool(stack)
        assert autopsy.pid is not None
        assert (autopsy.max_memory_bytes or 0) > 1_000_000
        assert autopsy.cpu_s is not None
        assert autopsy.seen_after_s is not None
        assert autopsy.seen_after_s < MOST_S
        assert autopsy.rule.startswith('on_crash="fail"')
        assert autopsy.stdout == f"died of {how}"
    assert sibling.result(timeout=MOST_S) == "rested"
    assert worker.process.poll() is None


def test_a_worker_that_is_lost_leaves_an_autopsy_to_its_jobs(fleet: Fleet) -> None:
    worker = fleet.start("--concurrency", "2")
    fleet.start("--queues", "other")
    jobs = [fleet.begin("nap", 60)[0], fleet.begin("nap", 60)[0]]
    worker.kill_family()
    for job in jobs:
        fleet.wait_final(job)
        autopsy = only_autopsy(fleet, job.id)
        assert autopsy.kind is DeathKind.WORKER_GONE
        assert autopsy.detector is Detector.NEIGHBOUR
        assert autopsy.beside == tuple(other.id for other in jobs if other.id != job.id)


def test_a_drain_is_explained_as_one(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(shutdown_grace="0.3s")
    worker = fleet.start("--concurrency", "1")
    job, _ = fleet.begin("nap", 60)
    assert worker.stop() == 0
    autopsy = only_autopsy(fleet, job.id)
    assert autopsy.kind is DeathKind.DRAIN
    assert job.record().state is JobState.FAILED
