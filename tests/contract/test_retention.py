"""What is old goes, what is live stays, and a tombstone stands until the dead hold nothing."""

from tests.support.backdoor import Backdoor
from tests.support.builders import crash, done, failure, new_job, put, run, running, turn, verdict

from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.recovery import GuardNone
from unstuck.ledger.contract.workers import Output

HOUR_S = 3600.0


def test_pruning_removes_old_finished_jobs_and_all_that_belongs_to_them(
    ledger: Ledger, w1: str, meddler: Backdoor
) -> None:
    old, young = running(ledger), running(ledger)
    turn(ledger, done=[done(old), done(young)], outputs=[Output(old.job_id, old.token, b"out", b"")])
    live = put(ledger)
    meddler.age_job(old.job_id, 2 * HOUR_S)
    meddler.age_job(live, 2 * HOUR_S)
    assert ledger.maintenance.prune(HOUR_S) == 1
    assert ledger.jobs.missing([old.job_id, young.job_id, live]) == {old.job_id}
    assert ledger.jobs.outputs(old.job_id) == []
    assert ledger.maintenance.prune(0.0) == 1
    assert ledger.jobs.count() == {"pending": 1}


def test_pruning_can_be_kept_to_some_states(ledger: Ledger, w1: str) -> None:
    succeeded, failed, crashed = running(ledger), running(ledger), running(ledger)
    turn(ledger, done=[done(succeeded)], endings=[failure(failed), crash(crashed)])
    assert ledger.maintenance.prune(0.0, ["failed"]) == 2
    assert ledger.jobs.count() == {"succeeded": 1}
    assert ledger.maintenance.prune(0.0, ["pending", "running"]) == 0


def test_pruning_goes_through_more_than_one_batch(ledger: Ledger, w1: str) -> None:
    ledger.jobs.enqueue([new_job() for _ in range(2500)])
    while jobs := run(ledger, limit=1000):
        turn(ledger, done=[done(job) for job in jobs])
    put(ledger)
    assert ledger.maintenance.prune(0.0) == 2500
    assert ledger.jobs.count() == {"pending": 1}


def test_retention_sweeps_jobs_events_and_workers_each_by_its_own_age(
    ledger: Ledger, w1: str, w2: str, meddler: Backdoor
) -> None:
    job, later = running(ledger), running(ledger)
    turn(ledger, endings=[failure(job), failure(later)])
    meddler.age_job(job.job_id, 2 * HOUR_S)
    meddler.age_events(2 * HOUR_S)
    ledger.workers.stop("w2")
    meddler.age_worker("w2", 2 * HOUR_S)
    events = len(ledger.events.list())
    swept = ledger.maintenance.sweep_old(HOUR_S, HOUR_S, HOUR_S, 100)
    assert (swept.jobs, swept.workers) == (1, 1)
    assert swept.events >= 2
    assert len(ledger.events.list()) == events - swept.events
    assert ledger.jobs.missing([job.job_id, later.job_id]) == {job.job_id}
    assert [worker.id for worker in ledger.workers.list()] == ["w1"]
    again = ledger.maintenance.sweep_old(HOUR_S, HOUR_S, HOUR_S, 100)
    assert (again.total, again.more) == (0, False)


def test_the_tombstone_of_the_dead_stays_while_they_hold_something(ledger: Ledger, w1: str, meddler: Backdoor) -> None:
    job = running(ledger)
    ledger.recovery.declare_dead("w1", verdict(), GuardNone())
    meddler.age_worker("w1", 2 * HOUR_S)
    assert ledger.maintenance.sweep_old(HOUR_S, HOUR_S, HOUR_S, 100).workers == 0
    ledger.recovery.settle("w1", [crash(job)], [], GuardNone())
    assert ledger.maintenance.sweep_old(HOUR_S, HOUR_S, HOUR_S, 100).workers == 1


def test_the_living_are_never_swept_however_old(ledger: Ledger, w1: str, meddler: Backdoor) -> None:
    meddler.age_worker("w1", 1000 * HOUR_S)
    meddler.age_beat("w1", 1000 * HOUR_S)
    assert ledger.maintenance.sweep_old(60.0, 60.0, 60.0, 100).workers == 0


def test_repeated_sweeps_reach_everything_although_each_is_bounded(ledger: Ledger, w1: str, meddler: Backdoor) -> None:
    ledger.jobs.enqueue([new_job() for _ in range(10)])
    jobs = run(ledger)
    turn(ledger, done=[done(job) for job in jobs])
    for job in jobs:
        meddler.age_job(job.job_id, 2 * HOUR_S)
    live = put(ledger)
    for _ in range(8):
        ledger.maintenance.sweep_old(HOUR_S, HOUR_S, HOUR_S, 3)
    assert ledger.jobs.missing([job.job_id for job in jobs]) == {job.job_id for job in jobs}
    assert ledger.jobs.missing([live]) == set()
