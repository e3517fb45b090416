"""A host makes its runners die: that worker is let go last, then not at all, and comes back when it is mended."""

import time
from pathlib import Path

import pytest
from tests.crash.conftest import MakeFleet
from tests.support.fleet import Fleet, WorkerProcess, wait_for

from unstuck import Job
from unstuck.client.operator import Operator
from unstuck.config import Settings
from unstuck.domain.conditions import Code
from unstuck.domain.retry import CRASH_BACKOFF_MAX_S
from unstuck.domain.states import FINAL_STATES, AttemptState, JobState
from unstuck.domain.worker_health import DISABLE_IN_A_ROW, DISABLE_IN_A_ROW_DEATHS, IN_A_ROW, Health, read_health
from unstuck.ledger.contract.workers import WorkerRecord
from unstuck.maintenance.worker_health import HealthWatch
from unstuck.recovery.result import SweepResult

SETTINGS = {"heartbeat_interval": "0.5s", "heartbeat_timeout": "20s"}
SINGLE_JOBS = 20
TO_THE_HEALTHY = 16
MOST_DEATHS = 60


def record(worker: WorkerProcess) -> WorkerRecord:
    found = worker.record()
    assert found is not None
    return found


def health(worker: WorkerProcess) -> Health:
    return read_health(record(worker).metadata.get("health"))


def sicken(fleet: Fleet, plague: Path) -> WorkerProcess:
    """Start a worker whose runners die under every job, and let them, until it says so of itself."""
    plague.touch()
    sick = fleet.start("--concurrency", "1", "--name", "sick", SICK=str(plague))
    for _ in range(MOST_DEATHS):
        fleet.wait_state(fleet.task("die_if_sick").enqueue(), JobState.FAILED)
        said = health(sick)
        if said.in_a_row >= DISABLE_IN_A_ROW and said.deaths >= DISABLE_IN_A_ROW_DEATHS + 1:
            return sick
    raise AssertionError(f"after {MOST_DEATHS} deaths it still takes itself for well: {health(sick)}")


def workers_of(fleet: Fleet, count: int) -> list[str]:
    """Let single jobs run one after the other, and give who ran each."""
    ran = []
    for _ in range(count):
        job = fleet.task("add").enqueue(1, 2)
        assert job.result(timeout=60) == 3
        ran.append(fleet.ledger.jobs.attempts(job.id)[-1].worker_id)
    return ran


def test_a_worker_under_which_every_job_dies_is_switched_off_once_another_serves_its_queues(
    make_fleet: MakeFleet, tmp_path: Path
) -> None:
    fleet = make_fleet(**SETTINGS)
    plague = tmp_path / "plague"
    sick = sicken(fleet, plague)
    done = SweepResult()
    HealthWatch("test").judge(fleet.ledger, done)
    assert (done.disabled, record(sick).disabled) == (0, None)  # It is the last one.

    well = fleet.start("--concurrency", "1", "--name", "well")
    wait_for(lambda: record(sick).disabled, "the sick worker disabled")
    flag = record(sick).disabled
    assert flag is not None
    assert flag.auto
    assert "its runners keep dying" in flag.reason
    event = next(event for event in fleet.ledger.events.list(worker_id=sick.id) if event.kind == "worker_disabled")
    assert flag.reason in event.message
    wait_for(lambda: "was disabled" in sick.said(), "the sick worker to hear of it")
    wait_for(lambda: "Worker disabled" in sick.said() + well.said(), "the reaper to say so")
    jobs = [fleet.task("die_if_sick").enqueue() for _ in range(10)]
    for job in jobs:
        job.result(timeout=60)
    assert {fleet.ledger.jobs.attempts(job.id)[-1].worker_id for job in jobs} == {well.id}

    # Mended and enabled, it works again; now the other one is off, by hand.
    plague.unlink()
    operator = Operator(fleet.ledger, Settings(url=fleet.url), by="ops")
    operator.workers.enable("sick")
    operator.workers.disable("well", "maintenance")
    wait_for(lambda: "enabled again" in sick.said() and "was disabled" in well.said(), "both to hear of it")
    waiting = fleet.task("die_if_sick").enqueue()
    waiting.result(timeout=60)
    assert fleet.ledger.jobs.attempts(waiting.id)[-1].worker_id == sick.id
    operator.workers.disable("sick", "maintenance")
    wait_for(lambda: sick.said().count("was disabled") == 2, "the sick worker to hear of it")
    stuck = fleet.task("add").enqueue(1, 2)
    assert "unstuck workers enable" in (operator.explain_wait(stuck.id) or "")


VICTIMS_AT_ONCE = 20


def test_a_worker_that_kills_every_job_gets_no_innocent_job_quarantined(make_fleet: MakeFleet, tmp_path: Path) -> None:
    fleet = make_fleet(**SETTINGS)
    plague = tmp_path / "plague"
    plague.touch()
    sick = fleet.start("--concurrency", "8", "--name", "sick", SICK=str(plague))
    well = fleet.start("--concurrency", "1", "--name", "well")
    jobs: list[Job[None]] = []
    while record(sick).disabled is None:
        assert len(jobs) < MOST_DEATHS * VICTIMS_AT_ONCE, health(sick)
        jobs += [fleet.task("victim").enqueue(0.02) for _ in range(VICTIMS_AT_ONCE)]
        for job in jobs[-VICTIMS_AT_ONCE:]:
            job.result(timeout=60)
    records = [job.record() for job in jobs]
    assert {one.state for one in records} == {JobState.SUCCEEDED}
    # The first crash is the job's, as far as anyone knows. Those after it are the worker's.
    assert max(one.crash_count for one in records) == 1
    # What died in its hands was not done by it.
    wait_for(lambda: record(well).processed == len(jobs), "the well worker to tell what it did")
    assert record(sick).processed == 0


FEW = 4
ENOUGH_DEATHS = 7


@pytest.mark.parametrize("concurrency", ["1", "8"])
def test_a_lone_worker_that_kills_every_job_gets_none_quarantined(
    make_fleet: MakeFleet, tmp_path: Path, concurrency: str
) -> None:
    fleet = make_fleet(**SETTINGS)
    plague = tmp_path / "plague"
    plague.touch()
    jobs = [fleet.task("victim").enqueue() for _ in range(FEW)]
    sick = fleet.start("--concurrency", concurrency, "--name", "sick", SICK=str(plague))

    def enough_deaths() -> bool:
        skip_backoff(fleet, jobs)
        return deaths_of(fleet, jobs) >= ENOUGH_DEATHS and sick_of_all(sick)

    wait_for(enough_deaths, "enough deaths")
    operator = Operator(fleet.ledger, Settings(url=fleet.url))
    assert Code.EVERYTHING_DIES in {finding.code for finding in operator.doctor()}
    records = [job.record() for job in jobs]
    assert JobState.QUARANTINED not in {one.state for one in records}
    assert max(one.crash_count for one in records) == 1
    # Mended, it proves itself with the next one that it tries, and the others are tried again in time.
    plague.unlink()

    def all_ended() -> bool:
        skip_backoff(fleet, jobs)
        return all(fleet.state(job) in FINAL_STATES for job in jobs)

    wait_for(all_ended, "every job to end")
    assert {fleet.state(job) for job in jobs} == {JobState.SUCCEEDED}


def test_jobs_that_always_die_are_quarantined_by_a_lone_worker_that_succeeds_with_others(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(**SETTINGS)
    deadly = [fleet.task("die_again").enqueue() for _ in range(4)]
    good = fleet.task("add").enqueue(1, 2)
    worker = fleet.start("--concurrency", "1")
    assert good.result(timeout=60) == 3
    for job in deadly:
        fleet.wait_state(job, JobState.QUARANTINED)
    assert record(worker).disabled is None
    assert fleet.task("add").enqueue(1, 2).result(timeout=60) == 3


def skip_backoff(fleet: Fleet, jobs: list[Job[None]]) -> None:
    """Make jobs due that wait for their next attempt, as if the time had passed."""
    backdoor = fleet.backdoor()
    for job in jobs:
        record = job.record()
        if record.state is JobState.PENDING and record.run_at > time.time():
            backdoor.age_job(job.id, CRASH_BACKOFF_MAX_S)


def deaths_of(fleet: Fleet, jobs: list[Job[None]]) -> int:
    return sum(one.state is AttemptState.CRASHED for job in jobs for one in fleet.ledger.jobs.attempts(job.id))


def sick_of_all(worker: WorkerProcess) -> bool:
    said = health(worker)
    return said.in_a_row >= IN_A_ROW and said.deaths > 1


def test_of_two_idle_workers_the_stable_one_gets_the_work(make_fleet: MakeFleet, tmp_path: Path) -> None:
    fleet = make_fleet(**SETTINGS, auto_disable_unhealthy=False)
    sick = sicken(fleet, tmp_path / "plague")
    (tmp_path / "plague").unlink()
    well = fleet.start("--concurrency", "1")
    ran = workers_of(fleet, SINGLE_JOBS)
    assert ran.count(well.id) >= TO_THE_HEALTHY, ran
    # Not shut out: alone, it does the work.
    assert well.stop() == 0
    assert workers_of(fleet, 1) == [sick.id]
