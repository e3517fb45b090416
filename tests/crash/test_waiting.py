"""Everyone who waits is told: results, errors, timeouts, and reasons why nothing moves."""

import asyncio
import logging
import threading

import pytest
from tests.crash.conftest import MakeFleet
from tests.fleet import Fleet, wait_for

from unstuck import JobCancelled, JobNotFound, JobQuarantined, ResultNotStorable, ResultTimeout, TaskFailed


def test_results_and_errors_reach_who_waits(fleet: Fleet) -> None:
    fleet.start("--concurrency", "2")
    assert fleet.task("add").enqueue(2, 3).result(timeout=30) == 5
    assert fleet.task("add_async").enqueue(2, 3).result(timeout=30) == 5
    with pytest.raises(TaskFailed) as failed:
        fleet.task("fail").enqueue("no luck").result(timeout=30)
    assert failed.value.remote_type == "RuntimeError"
    assert failed.value.message == "no luck"
    assert "no luck" in failed.value.remote_traceback
    with pytest.raises(JobQuarantined):
        fleet.task("die_again").enqueue().result(timeout=60)
    job = fleet.task("add").options(delay="1h").enqueue(1, 1)
    assert job.cancel() == "cancelled"
    with pytest.raises(JobCancelled):
        job.result(timeout=5)
    about = fleet.task("about").enqueue()
    assert about.result(timeout=30) == {"job_id": about.id, "task": "about", "attempt": 1}


@pytest.mark.parametrize("kind", ["nan", "surrogate", "set", "big"])
def test_a_result_that_cannot_be_stored_fails_alone(fleet: Fleet, kind: str) -> None:
    fleet.start("--concurrency", "2")
    bad = fleet.task("give").enqueue(kind)
    good = fleet.task("add").enqueue_many([(n, n) for n in range(20)])
    with pytest.raises(ResultNotStorable):
        bad.result(timeout=30)
    assert [job.result(timeout=30) for job in good] == [2 * n for n in range(20)]


def test_a_nul_in_a_result_comes_back_as_it_was(fleet: Fleet) -> None:
    fleet.start("--concurrency", "1")
    assert fleet.task("give").enqueue("nul").result(timeout=30) == "a\0b"
    with pytest.raises(TaskFailed, match="x00"):
        fleet.task("fail").enqueue("a\0b").result(timeout=30)


def test_a_timeout_says_what_the_job_is_doing(fleet: Fleet) -> None:
    job = fleet.task("add").enqueue(1, 2)
    with pytest.raises(ResultTimeout, match="No living worker serves"):
        job.result(timeout=0.2)
    with pytest.raises(TimeoutError):
        job.result(timeout=0)
    fleet.start("--concurrency", "1")
    long, _ = fleet.begin("nap", 30)
    with pytest.raises(ResultTimeout, match="run"):
        long.result(timeout=0.2)


def test_who_waits_without_end_is_told_why(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("unstuck.notify.waiting.FIRST_WORRY_S", 0.2)
    told: list[str] = []
    monkeypatch.setattr("unstuck.notify.waiting.log", _Listener(told))
    caplog.set_level(logging.WARNING)
    job = fleet.task("add").enqueue(1, 2)
    fleet.app.operator.pause("default")
    waiting = threading.Thread(target=lambda: job.result(timeout=60), daemon=True)
    waiting.start()
    wait_for(lambda: any("paused" in line for line in told), "the reason")
    fleet.app.operator.resume("default")
    fleet.start()
    waiting.join(30)
    assert not waiting.is_alive()


class _Listener:
    def __init__(self, told: list[str]) -> None:
        self._told = told

    def warning(self, sentence: str, **_fields: object) -> None:
        self._told.append(sentence)


def test_waiting_for_a_job_that_does_not_exist_ends(fleet: Fleet) -> None:
    with pytest.raises(JobNotFound):
        fleet.app.job(987654321).result(timeout=10)


def test_a_thousand_wait_at_once_in_one_event_loop(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    fleet.start("--concurrency", "50")

    async def all_of_them() -> list[int]:
        jobs = await asyncio.gather(*(fleet.task("add_async").enqueue_async(n, 1) for n in range(1000)))
        return await asyncio.gather(*(job.result_async(timeout=60) for job in jobs))

    assert asyncio.run(all_of_them()) == [n + 1 for n in range(1000)]


def test_output_is_kept_with_the_attempt_and_bounded(fleet: Fleet) -> None:
    fleet.start("--concurrency", "1")
    quiet = fleet.task("shout").enqueue("hello", 2)
    loud = fleet.task("shout").enqueue("x" * 1000, 2000)
    quiet.result(timeout=30)
    loud.result(timeout=30)
    kept = fleet.ledger.outputs(quiet.id)[0]
    assert kept.stdout == kept.stderr == b"hello\nhello\n"
    flood = fleet.ledger.outputs(loud.id)[0]
    assert 60_000 < len(flood.stdout) < 70_000
    assert b"left out" in flood.stdout
