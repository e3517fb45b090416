"""A whole worker dies with its runners: by neighbours, by session, by lease, by supervisor."""

import time

import pytest
from tests.crash.conftest import MakeFleet
from tests.fleet import Fleet, at_best, wait_for

from unstuck import WorkerCrashed
from unstuck.client.job import Job
from unstuck.domain.liveness import Detector
from unstuck.domain.states import JobState, WorkerState


def detector_of(fleet: Fleet, worker_id: str) -> Detector:
    def look() -> Detector | None:
        worker = next(w for w in fleet.ledger.workers() if w.id == worker_id)
        return worker.verdict.detector if worker.state is WorkerState.DEAD and worker.verdict else None

    return wait_for(look, f"verdict on {worker_id}")


def start_victim(fleet: Fleet, task: str = "nap") -> tuple[str, Job]:
    """Start a worker of its own queue and wait until it is in a job; give its id and the job."""
    worker = fleet.start("--queues", "other", "--concurrency", "2")
    job, _ = fleet.begin(task, 60, "other")
    return worker.id, job


def test_a_neighbour_sees_the_death_within_a_second(fleet: Fleet) -> None:
    fleet.start("--queues", "default", "--concurrency", "2")

    def kill_one() -> float:
        worker_id, job = start_victim(fleet)
        fleet.task("add").enqueue_many([(n, n) for n in range(100)])
        killed_s = time.monotonic()
        fleet.workers[-1].kill_family()
        took_s = fleet.wait_final(job) - killed_s
        assert detector_of(fleet, worker_id) is Detector.NEIGHBOUR
        with pytest.raises(WorkerCrashed, match="Worker died unexpectedly"):
            job.result(timeout=5)
        return took_s

    at_best(kill_one, 1.0)


def test_a_job_to_be_retried_goes_back_to_the_queue_and_one_crash_is_counted(fleet: Fleet) -> None:
    fleet.start("--queues", "default")
    worker_id, job = start_victim(fleet, "nap_again")
    fleet.workers[-1].kill()
    assert detector_of(fleet, worker_id) is Detector.NEIGHBOUR
    fleet.wait_state(job, JobState.PENDING)
    record = job.record()
    assert record.crash_count == 1
    assert record.failures == 0
    assert f"Task re-queued due to stale worker: {worker_id}" in fleet.ledger.events(job_id=job.id)[-1].message


def test_with_neighbours_blinded_the_lost_session_tells_within_seconds(make_fleet: MakeFleet, url: str) -> None:
    if url.startswith("sqlite"):
        pytest.skip("SQLite has one host and no sessions")
    fleet = make_fleet(evidence="session")
    fleet.start("--queues", "default")
    at_best(lambda: _lose_one(fleet, Detector.SESSION), 5.0)


def test_without_any_evidence_the_lease_tells(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(evidence="none", heartbeat_interval="0.5s", heartbeat_timeout="3s", check_interval="0.5s")
    fleet.start("--queues", "default")
    at_best(lambda: _lose_one(fleet, Detector.LEASE), 3.0 + 0.5 + 2.0)


def _lose_one(fleet: Fleet, detector: Detector) -> float:
    worker_id, job = start_victim(fleet)
    killed_s = time.monotonic()
    fleet.workers[-1].kill_family()
    took_s = fleet.wait_final(job) - killed_s
    assert detector_of(fleet, worker_id) is detector
    return took_s


def test_a_killed_job_with_a_policy_of_retry_runs_again_elsewhere(fleet: Fleet) -> None:
    fleet.start("--queues", "other,default")
    victim = fleet.start("--queues", "other")
    jobs = [fleet.task("nap_again").options(queue="other").enqueue(1) for _ in range(8)]
    for job in jobs[:2]:
        # On a busy machine a nap may be over before we look.
        fleet.wait_state(job, JobState.RUNNING, JobState.SUCCEEDED)
    victim.kill_family()
    for job in jobs:
        assert job.result(timeout=60) == "rested"


def test_the_last_worker_dies_and_the_next_one_settles_what_it_held(fleet: Fleet) -> None:
    worker = fleet.start()
    job = fleet.task("nap_again").enqueue(0.5)
    fleet.wait_running(job)
    worker.kill_family()
    fleet.start()
    assert job.result(timeout=30) == "rested"
