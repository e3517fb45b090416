"""A job that kills whatever runs it is found, and the others finish."""

from pathlib import Path

import pytest
from tests.fleet import Fleet

from unstuck import JobQuarantined
from unstuck.domain.states import AttemptState, JobState

MOST_S = 60.0


def test_a_job_that_always_kills_its_runner_is_quarantined_while_others_finish(fleet: Fleet) -> None:
    worker = fleet.start("--concurrency", "2")
    poison = fleet.task("die_again").enqueue("segfault")
    others = fleet.task("add").enqueue_many([(n, n) for n in range(100)])
    assert [job.result(timeout=MOST_S) for job in others] == [2 * n for n in range(100)]
    with pytest.raises(JobQuarantined) as caught:
        poison.result(timeout=MOST_S)
    assert caught.value.code == "CRASHED_TOO_OFTEN"
    attempts = fleet.ledger.attempts(poison.id)
    # What it killed, each with its own autopsy.
    assert [attempt.state for attempt in attempts] == [AttemptState.CRASHED] * 4
    assert all(attempt.autopsy is not None and attempt.autopsy.signal == "SIGSEGV" for attempt in attempts)
    assert all(job.record().crash_count == 0 for job in others)
    assert worker.process.poll() is None


def test_a_poison_job_among_fifty_on_one_loop_is_found_by_running_alone(fleet: Fleet, tmp_path: Path) -> None:
    notes = [str(tmp_path / f"other-{number}") for number in range(50)]
    worker = fleet.start("--concurrency", "60")
    others = fleet.task("nap_async_once_then_quick").enqueue_many([(600, path) for path in notes])
    poison = fleet.task("poison_async").enqueue(notes)
    for job in others:
        assert job.result(timeout=MOST_S) == "quick"
        record = job.record()
        # In company it proves nothing, so nobody is charged with it.
        assert record.crash_count == 0
        assert record.suspicions <= 1
    with pytest.raises(JobQuarantined):
        poison.result(timeout=MOST_S)
    record = poison.record()
    assert record.state is JobState.QUARANTINED
    assert record.crash_count == 3
    first, *alone = [attempt.autopsy for attempt in fleet.ledger.attempts(poison.id)]
    assert first is not None
    assert first.beside_count == 50
    assert "runs alone next" in first.rule
    assert [autopsy.beside_count for autopsy in alone if autopsy is not None] == [0, 0, 0]
    assert worker.process.poll() is None
    # Everything goes on as before, on one loop.
    assert fleet.task("add_async").enqueue(1, 2).result(timeout=MOST_S) == 3
