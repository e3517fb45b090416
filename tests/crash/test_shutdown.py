"""A worker is asked to go: it drains, releases, beats until the end, and exits 0."""

import signal

import pytest
from tests.crash.conftest import MakeFleet
from tests.fleet import Fleet, wait_for

from unstuck import WorkerCrashed
from unstuck.domain.states import AttemptState, JobState, WorkerState


def test_sigterm_lets_what_runs_end_and_gives_back_the_rest(fleet: Fleet) -> None:
    worker = fleet.start("--concurrency", "1")
    worker_id = worker.id
    running, _ = fleet.begin("nap", 1.0)
    waiting = fleet.task("nap").enqueue_many([(0.01,)] * 5)
    assert worker.stop() == 0
    assert "Received shutdown signal, gracefully exiting..." in worker.said()
    assert fleet.state(running) is JobState.SUCCEEDED
    for job in waiting:
        record = job.record()
        assert record.state in (JobState.PENDING, JobState.SUCCEEDED)
        assert record.crash_count == record.failures == 0
    old = next(record for record in fleet.ledger.workers() if record.id == worker_id)
    assert old.state is WorkerState.STOPPED
    assert old.held == 0
    # Counted to the last one, although no beat was due since.
    assert old.processed == 1 + sum(job.record().state is JobState.SUCCEEDED for job in waiting)


def test_a_draining_worker_is_seen_draining_and_still_beats(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(heartbeat_interval="0.2s", heartbeat_timeout="2s", check_interval="0.2s", evidence="none")
    worker = fleet.start("--concurrency", "1")
    fleet.start("--queues", "other")
    job, _ = fleet.begin("nap", 6.0)
    worker.process.send_signal(signal.SIGTERM)
    wait_for(lambda: worker.record().state is WorkerState.DRAINING, "draining")  # type: ignore[union-attr]
    # It drains for several timeouts; nobody may take it for dead meanwhile.
    assert job.result(timeout=30) == "rested"
    assert worker.process.wait(20) == 0
    assert len(fleet.ledger.attempts(job.id)) == 1


def test_what_does_not_end_within_the_grace_is_killed_and_counts_for_nobody(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(shutdown_grace="0.5s")
    worker = fleet.start("--concurrency", "3")
    plain, _ = fleet.begin("nap", 60)
    again, _ = fleet.begin("nap_again", 60)
    shared, _ = fleet.begin("nap_async_again", 60)
    assert worker.stop() == 0
    with pytest.raises(WorkerCrashed) as caught:
        plain.result(timeout=5)
    assert str(caught.value.cause).startswith("drain")
    assert plain.record().crash_count == 0
    for job in (again, shared):
        record = job.record()
        assert record.state is JobState.PENDING
        assert record.crash_count == 0
        assert fleet.ledger.attempts(job.id)[0].state is AttemptState.DRAINED


def test_a_second_signal_hurries(fleet: Fleet) -> None:
    worker = fleet.start("--concurrency", "1")
    job, _ = fleet.begin("nap_again", 60)
    worker.process.send_signal(signal.SIGINT)
    wait_for(lambda: "Received shutdown signal" in worker.said(), "the first signal heeded")
    worker.process.send_signal(signal.SIGINT)
    assert worker.process.wait(10) == 0
    assert job.record().state is JobState.PENDING


def test_an_operator_drains_a_worker(fleet: Fleet) -> None:
    worker = fleet.start("--concurrency", "1")
    job, _ = fleet.begin("nap", 1.0)
    fleet.app.operator.ask_worker(worker.id, "drain")
    assert worker.process.wait(30) == 0
    assert fleet.state(job) is JobState.SUCCEEDED


def test_cancelling_a_running_job_ends_it_at_once(fleet: Fleet) -> None:
    fleet.start("--concurrency", "2")
    plain, _ = fleet.begin("nap", 60)
    shared, _ = fleet.begin("nap_async", 60)
    for job in (plain, shared):
        assert job.cancel() == "requested"
        fleet.wait_final(job, patience_s=4)
        assert fleet.state(job) is JobState.CANCELLED
    assert fleet.task("add").enqueue(1, 2).result(timeout=30) == 3


def test_a_job_past_its_deadline_is_ended(fleet: Fleet) -> None:
    fleet.start("--concurrency", "1")
    job = fleet.task("overrun").enqueue(60)
    fleet.wait_final(job, patience_s=20)
    record = job.record()
    assert record.state is JobState.FAILED
    assert record.error is not None
    assert record.error.code == "DEADLINE_EXCEEDED"


def test_runners_are_recycled_after_so_many_jobs(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(recycle_after_jobs=5)
    worker = fleet.start("--concurrency", "1")
    seen = set()
    for _ in range(12):
        job, runner = fleet.begin("nap", 0.0)
        assert job.result(timeout=30) == "rested"
        seen.add(runner)
    assert len(seen) >= 3
    assert worker.process.poll() is None
