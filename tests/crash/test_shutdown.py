"""A worker is asked to go: it drains, releases, beats until the end, and exits 0."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.crash.conftest import MakeFleet
from tests.support.fleet import ROOT, Fleet, wait_for
from tests.support.points import PassedPoints

from unstuck import App, WorkerCrashed
from unstuck.domain.states import AttemptState, JobState, WorkerState

pytestmark = pytest.mark.both_databases


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
    old = next(record for record in fleet.ledger.workers.list() if record.id == worker_id)
    assert old.state is WorkerState.STOPPED
    assert old.held == 0
    # Counted to the last one, although no beat was due since.
    assert old.processed == 1 + sum(job.record().state is JobState.SUCCEEDED for job in waiting)


def test_a_draining_worker_is_seen_draining_and_still_beats(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(heartbeat_interval="0.2s", check_interval="0.2s", evidence="none")
    signals = PassedPoints(fleet.folder)
    worker = fleet.start("--concurrency", "1", **signals.of("beat.before"))
    fleet.start("--queues", "other")
    gate, notes = fleet.folder / "over", fleet.folder / "notes"
    job = fleet.task("wait_for_file").enqueue(str(gate), str(notes))
    wait_for(notes.exists, "the job to begin")
    worker.process.send_signal(signal.SIGTERM)
    wait_for(lambda: worker.record().state is WorkerState.DRAINING, "draining")  # type: ignore[union-attr]
    signals.wait("beat.before", worker.pid, signals.count("beat.before", worker.pid) + 3)
    gate.touch()
    assert job.result(timeout=30) == "rested"
    assert worker.process.wait(20) == 0
    assert len(fleet.ledger.jobs.attempts(job.id)) == 1


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
        assert fleet.ledger.jobs.attempts(job.id)[0].state is AttemptState.DRAINED


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
    fleet.app.operator.workers.drain(worker.id)
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


NEW_CODE = """
from unstuck import App
app = App()

@app.task
def add(a, b):
    return a + b

@app.task
def brand_new():
    return "new"
"""


def test_a_worker_claims_only_what_its_app_knows(fleet: Fleet, tmp_path: Path) -> None:
    fleet.start("--concurrency", "2")
    newer = App(fleet.url)

    @newer.task
    def brand_new() -> str:
        return "new"

    unknown = brand_new.enqueue()
    known = fleet.task("add").enqueue_many([(n, n) for n in range(20)])
    for job in known:
        job.result(timeout=30)
    assert unknown.state is JobState.PENDING
    assert "brand_new" in str(fleet.app.operator.explain_wait(unknown.id))
    (tmp_path / "newer_app.py").write_text(NEW_CODE)
    process = subprocess.Popen(
        [sys.executable, "-m", "unstuck.cli.main", "worker", "newer_app:app"],
        cwd=tmp_path,
        env={**os.environ, "UNSTUCK_URL": fleet.url, "PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert unknown.result(timeout=30) == "new"
        assert fleet.task("add").enqueue(1, 2).result(timeout=30) == 3
    finally:
        process.terminate()
        process.wait(20)
        newer.close()


def test_many_jobs_of_an_unknown_task_do_not_hide_the_known_ones(fleet: Fleet) -> None:
    newer = App(fleet.url)

    @newer.task
    def brand_new(n: int) -> int:
        return n

    brand_new.enqueue_many([(n,) for n in range(5_000)])
    newer.close()
    fleet.start("--concurrency", "4")
    jobs = fleet.task("add").enqueue_many([(n, n) for n in range(200)])
    wait_for(lambda: len(fleet.ledger.jobs.outcomes([job.id for job in jobs])) == len(jobs), "the known jobs to end")


def test_newer_code_asks_for_a_shorter_lease_than_the_old_worker_beats(fleet: Fleet) -> None:
    """The worker beats every 15 s for its own app; the job brought a timeout of 8 s: it must not lose it each time."""
    fleet.start("--concurrency", "1", UNSTUCK_HEARTBEAT_INTERVAL="15s")
    newer = App(fleet.url)

    @newer.task(on_crash="retry", heartbeat_interval="2s", heartbeat_timeout="8s")
    def nap_again(seconds: float, path: str = "") -> str:
        return "rested"

    job = nap_again.enqueue(11.0)
    assert job.result(timeout=60) == "rested"
    assert len(fleet.ledger.jobs.attempts(job.id)) == 1
    newer.close()
