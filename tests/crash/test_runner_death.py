"""A runner dies in the middle of a job."""

import signal
import time

import psutil
import pytest
from tests.fleet import Fleet, wait_for

from unstuck import OutOfMemory, WorkerCrashed
from unstuck.domain.states import JobState

KILLS = 3


def test_a_killed_runner_is_settled_in_half_a_second_and_its_siblings_are_untouched(fleet: Fleet) -> None:
    fleet.start("--concurrency", "3")
    took_s = []
    for _ in range(KILLS):
        sibling = fleet.task("nap").enqueue(1.5)
        fleet.wait_running(sibling)
        others = fleet.workers[0].runners()
        victim = fleet.task("nap").enqueue(60)
        fleet.wait_running(victim)
        fleet.task("add").enqueue_many([(n, n) for n in range(50)])
        runner = runner_of(fleet, victim.id, {process.pid for process in others})
        killed_s = time.monotonic()
        runner.kill()
        took_s.append(fleet.wait_final(victim) - killed_s)
        with pytest.raises(WorkerCrashed, match="Worker died unexpectedly") as caught:
            victim.result(timeout=5)
        assert caught.value.code == "WORKER_CRASHED"
        assert "SIGKILL" in str(caught.value.cause)
        assert not isinstance(caught.value, OutOfMemory)
        assert sibling.result(timeout=30) == "rested"
    assert sorted(took_s)[KILLS // 2] < 0.5, took_s


def runner_of(fleet: Fleet, job_id: int, known: set[int]) -> psutil.Process:
    """Find the runner that naps for this job: the one that is new, or any that is not a sibling's."""

    def look() -> psutil.Process | None:
        return next((p for p in fleet.workers[0].runners() if p.pid not in known), None)

    return wait_for(look, f"the runner of job {job_id}")


@pytest.mark.parametrize(
    ("how", "words"), [("kill", "SIGKILL"), ("exit", "code 3"), ("segfault", "SIGSEGV")], ids=["kill", "exit", "segv"]
)
def test_every_way_of_dying_is_named(fleet: Fleet, how: str, words: str) -> None:
    fleet.start("--concurrency", "1")
    job = fleet.task("die").enqueue(how)
    with pytest.raises(WorkerCrashed) as caught:
        job.result(timeout=30)
    assert words in str(caught.value.cause)


def test_a_job_that_kills_four_times_is_quarantined(fleet: Fleet) -> None:
    fleet.start("--concurrency", "2")
    job = fleet.task("die_again").enqueue("kill")
    fleet.wait_final(job)
    record = job.record()
    assert record.state is JobState.QUARANTINED
    assert record.crash_count == 4
    assert record.error is not None
    assert record.error.code == "CRASHED_TOO_OFTEN"
    assert len(fleet.ledger.attempts(job.id)) == 4
    # It kills its runners, not the worker: others are served as before.
    assert fleet.task("add").enqueue(1, 2).result(timeout=30) == 3


def test_the_whole_nursery_dies_and_work_goes_on(fleet: Fleet) -> None:
    worker = fleet.start("--concurrency", "2")
    job = fleet.task("nap_again").enqueue(2)
    fleet.wait_running(job)
    nursery = worker.family()[1]
    nursery.send_signal(signal.SIGKILL)
    assert job.result(timeout=60) == "rested"
    assert fleet.task("add").enqueue(1, 2).result(timeout=30) == 3
    assert worker.process.poll() is None


def test_an_async_runner_dies_with_all_that_it_was_doing(fleet: Fleet) -> None:
    worker = fleet.start("--concurrency", "10")
    jobs = [fleet.task("nap_async").enqueue(30) for _ in range(3)]
    again = [fleet.task("nap_async_again").enqueue(0.5) for _ in range(3)]
    for job in jobs + again:
        fleet.wait_state(job, JobState.RUNNING, JobState.SUCCEEDED)
    worker.runners()[0].kill()
    for job in jobs:
        with pytest.raises(WorkerCrashed):
            job.result(timeout=10)
    for job in again:
        assert job.result(timeout=30) == "rested"
