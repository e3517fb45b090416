"""Outcomes that a lock keeps from the ledger: their attempts are over, and are not ended a second time as late."""

import pytest
from tests.support.backdoor import Backdoor
from tests.support.builders import birth, claim_jobs, crash_retry, done, put, running, start, turn, verdict

from unstuck.domain.states import WorkerState
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.recovery import GuardNone
from unstuck.ledger.contract.workers import Claimed, DeferredOutcome


def late_job(ledger: Ledger, meddler: Backdoor) -> Claimed:
    """Run a job for longer than its deadline and all grace allow."""
    job = running(ledger, timeout_s=5.0)
    meddler.age_job(job.job_id, 600.0)
    assert [one.job_id for one in ledger.recovery.overdue(10)] == [job.job_id]
    return job


def deferred(job: Claimed, **changes: bool) -> DeferredOutcome:
    return DeferredOutcome(job.job_id, job.token, "blocked by session 4711", **changes)


@pytest.mark.parametrize("is_return", [False, True])
def test_an_attempt_whose_outcome_waits_for_a_lock_is_not_late(
    ledger: Ledger, w1: str, meddler: Backdoor, is_return: bool
) -> None:
    job = late_job(ledger, meddler)
    ledger.workers.note_deferred("w1", [deferred(job, is_return=is_return)])
    assert ledger.recovery.overdue(10) == []
    [held] = ledger.workers.held("w1")
    assert held.deferred
    found = ledger.jobs.deferred_outcome(job.job_id)
    assert found is not None
    assert (found.worker_id, found.is_return, found.reason) == ("w1", is_return, "blocked by session 4711")
    turn(ledger, done=[done(job)])
    assert ledger.jobs.deferred_outcome(job.job_id) is None


def test_a_worker_that_is_only_suspected_keeps_its_deferred_outcome_and_a_dead_one_does_not(
    ledger: Ledger, w1: str, meddler: Backdoor
) -> None:
    job = late_job(ledger, meddler)
    ledger.workers.note_deferred("w1", [deferred(job)])
    ledger.recovery.declare_dead("w1", verdict(WorkerState.SUSPECT), GuardNone())
    assert ledger.recovery.overdue(10) == []
    ledger.recovery.declare_dead("w1", verdict(WorkerState.DEAD), GuardNone())
    assert [one.job_id for one in ledger.recovery.overdue(10)] == [job.job_id]
    assert ledger.workers.held("w1")[0].deferred, "whoever settles it can say what was lost"


def test_a_note_is_good_for_one_attempt_of_one_worker(ledger: Ledger, w1: str, w2: str, meddler: Backdoor) -> None:
    job = running(ledger, timeout_s=5.0)
    ledger.workers.note_deferred("w1", [deferred(job)])
    turn(ledger, endings=[crash_retry(job)])
    [again] = claim_jobs(ledger, "w2")
    start(ledger, [again], "w2")
    ledger.workers.note_deferred("w2", [deferred(job)])
    meddler.age_job(job.job_id, 600.0)
    assert [one.token for one in ledger.recovery.overdue(10)] == [again.token]
    assert ledger.jobs.deferred_outcome(job.job_id) is None


def test_a_note_for_a_time_is_no_longer_good_after_it(ledger: Ledger, w1: str, meddler: Backdoor) -> None:
    job = late_job(ledger, meddler)
    ledger.workers.note_deferred("w1", [deferred(job)], good_for_s=60.0)
    assert ledger.recovery.overdue(10) == []
    ledger.workers.note_deferred("w1", [deferred(job)], good_for_s=-1.0)
    assert [one.job_id for one in ledger.recovery.overdue(10)] == [job.job_id]
    assert ledger.jobs.deferred_outcome(job.job_id) is None


def test_notes_of_what_is_over_do_not_pile_up(ledger: Ledger, w1: str, meddler: Backdoor) -> None:
    for _ in range(3):
        job = running(ledger)
        ledger.workers.note_deferred("w1", [deferred(job)])
        turn(ledger, done=[done(job)])
        assert meddler.count("deferred_outcomes") == 1
    ledger.workers.note_deferred("nobody", [DeferredOutcome(put(ledger), 1, "")])
    ledger.workers.register(birth("w3"))
    assert meddler.count("deferred_outcomes") == 1, "only of workers that exist"
