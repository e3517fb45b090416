"""A runner dies in the middle of a job."""

import os
import signal
import time

import pytest
from tests.fleet import Fleet, at_best

from unstuck import OutOfMemory, TaskFailed, WorkerCrashed
from unstuck.domain.states import JobState


def test_a_killed_runner_is_settled_in_half_a_second_and_its_siblings_are_untouched(fleet: Fleet) -> None:
    fleet.start("--concurrency", "3")

    def kill_one() -> float:
        sibling, _ = fleet.begin("nap", 1.5)
        victim, runner = fleet.begin("nap", 60)
        fleet.task("add").enqueue_many([(n, n) for n in range(50)])
        killed_s = time.monotonic()
        os.kill(runner, signal.SIGKILL)
        took_s = fleet.wait_final(victim) - killed_s
        with pytest.raises(WorkerCrashed, match="Worker died unexpectedly") as caught:
            victim.result(timeout=5)
        assert caught.value.code == "WORKER_CRASHED"
        assert "SIGKILL" in str(caught.value.cause)
        assert not isinstance(caught.value, OutOfMemory)
        assert sibling.result(timeout=30) == "rested"
        return took_s

    at_best(kill_one, 0.5)


@pytest.mark.parametrize(
    ("how", "words"), [("kill", "SIGKILL"), ("exit", "code 3"), ("segfault", "SIGSEGV")], ids=["kill", "exit", "segv"]
)
def test_every_way_of_dying_is_named(fleet: Fleet, how: str, words: str) -> None:
    worker = fleet.start("--concurrency", "1")
    job = fleet.task("die").enqueue(how)
    with pytest.raises(WorkerCrashed) as caught:
        job.result(timeout=30)
    assert words in str(caught.value.cause)
    # The worker lives: its log says what died. On the job the words are those that people look for.
    assert "Worker died" in str(caught.value)
    said = worker.said()
    assert "Worker died" not in said
    [line] = [line for line in said.splitlines() if "Runner process died; its job failed" in line]
    assert f"job_id={job.id}" in line
    assert words in line
    # So is every failure a line: each try, and the last one.
    failing = fleet.task("fail").enqueue("no such customer")
    with pytest.raises(TaskFailed):
        failing.result(timeout=30)
    lines = [line for line in worker.said().splitlines() if f"job_id={failing.id} " in line]
    assert len(lines) == len(fleet.ledger.attempts(failing.id))
    assert all("RuntimeError: no such customer" in line for line in lines)
    assert " Job failed [" in lines[-1]


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
    job, _ = fleet.begin("nap_again", 2)
    nursery = worker.family()[1]
    nursery.send_signal(signal.SIGKILL)
    assert job.result(timeout=60) == "rested"
    assert fleet.task("add").enqueue(1, 2).result(timeout=30) == 3
    assert worker.process.poll() is None


def test_an_async_runner_dies_with_all_that_it_was_doing(fleet: Fleet) -> None:
    worker = fleet.start("--concurrency", "10")
    jobs = [fleet.begin("nap_async", 30)[0] for _ in range(3)]
    again = [fleet.begin("nap_async_again", 0.5)[0] for _ in range(3)]
    worker.runners()[0].kill()
    for job in jobs:
        with pytest.raises(WorkerCrashed):
            job.result(timeout=10)
    for job in again:
        assert job.result(timeout=30) == "rested"
