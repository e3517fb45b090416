"""The network between one worker and the ledger is cut: neither refused nor answered."""

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.fleet import Fleet, wait_for
from tests.proxy import Proxy

from unstuck.domain.liveness import Detector
from unstuck.domain.states import AttemptState, JobState, WorkerState

SETTINGS = {"heartbeat_interval": "0.5s", "heartbeat_timeout": "3s", "check_interval": "0.25s", "evidence": "none"}


@pytest.fixture
def proxy(ready_pg_url: str) -> Iterator[Proxy]:
    with Proxy(ready_pg_url) as made:
        yield made


def test_a_worker_cut_off_stops_its_job_before_somebody_else_begins_it(
    ready_pg_url: str, proxy: Proxy, tmp_path: Path
) -> None:
    fleet = Fleet(ready_pg_url, tmp_path, **SETTINGS)
    try:
        far = fleet.start("--concurrency", "1", UNSTUCK_URL=proxy.url)
        far_id = far.id
        notes = tmp_path / "notes"
        job = fleet.task("nap_once_then_quick").enqueue(60.0, str(notes))
        wait_for(lambda: notes.exists() and "\n" in notes.read_text(), "the first attempt to begin")
        first_runner = psutil.Process(int(notes.read_text().split()[1]))
        fleet.start("--concurrency", "1")
        proxy.cut()
        wait_for(lambda: notes.read_text().count("begun") == 2, "the second attempt to begin")
        # The second attempt has only just begun: the first must be gone already.
        assert not first_runner.is_running() or first_runner.status() == psutil.STATUS_ZOMBIE
        assert job.result(timeout=30) == "quick"
        record = next(worker for worker in fleet.ledger.workers() if worker.id == far_id)
        assert record.state is WorkerState.DEAD
        assert record.verdict is not None
        assert record.verdict.detector is Detector.LEASE
        proxy.heal()
        wait_for(lambda: (r := far.record()) is not None and r.id != far_id, "the lost worker to come back")
        assert fleet.state(job) is JobState.SUCCEEDED
        states = [attempt.state for attempt in fleet.ledger.attempts(job.id)]
        assert states.count(AttemptState.SUCCEEDED) == 1
    finally:
        fleet.close()


def test_a_short_cut_costs_nothing(ready_pg_url: str, proxy: Proxy, tmp_path: Path) -> None:
    fleet = Fleet(ready_pg_url, tmp_path)
    try:
        far = fleet.start("--concurrency", "2", UNSTUCK_URL=proxy.url)
        fleet.start("--queues", "other")
        jobs = [fleet.begin("nap", 4)[0], fleet.begin("nap_again", 4)[0]]
        proxy.cut()
        wait_for(lambda: far.record().silent_s > 6, "a beat to be missed")  # type: ignore[union-attr]
        proxy.heal()
        for job in jobs:
            assert job.result(timeout=60) == "rested"
            assert len(fleet.ledger.attempts(job.id)) == 1
    finally:
        fleet.close()
