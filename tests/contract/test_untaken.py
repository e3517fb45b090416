"""Requests that no worker took in time are cancelled, and only those."""

from collections.abc import Collection

import pytest
from tests.contract.test_journal import suspend
from tests.support.builders import claim_jobs, put, state_of, turn

from unstuck.config import Recovery, Settings
from unstuck.config.groups import MdpSettings
from unstuck.domain.states import JobState
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.jobs import JobPosition
from unstuck.mdp.broker.batch import Batch, BatchResult
from unstuck.mdp.broker.batch_runner import BatchRunner
from unstuck.recovery.reap import Reaper


@pytest.mark.parametrize("moment", ["claimed", "running", "asleep", "not due"])
def test_a_job_that_does_not_wait_for_a_worker_is_left_alone(ledger: Ledger, w1: str, moment: str) -> None:
    if moment == "not due":
        job_id = put(ledger, delay_s=60.0)
    else:
        job_id = put(ledger)
        [job] = claim_jobs(ledger, limit=1, start=0 if moment == "claimed" else 1)
        if moment == "asleep":
            turn(ledger, endings=[suspend(job, 60.0, "go")])
    before, other = state_of(ledger, job_id), put(ledger)
    assert ledger.jobs.cancel_untaken([job_id, other], 0.0, "me") == [other]
    assert (state_of(ledger, job_id), state_of(ledger, other)) == (before, JobState.CANCELLED)
    assert not ledger.jobs.get(job_id).cancel_requested  # type: ignore[union-attr]


def test_only_what_was_due_for_so_long_is_cancelled(ledger: Ledger, w1: str) -> None:
    job_id = put(ledger)
    assert ledger.jobs.cancel_untaken([job_id], 60.0, "me") == []
    assert ledger.jobs.cancel_untaken([], 0.0, "me") == []
    assert ledger.jobs.cancel_untaken([job_id + 1_000, job_id], 0.0, "me") == [job_id]


def test_a_job_that_is_begun_just_after_the_broker_looked_goes_on(
    ledger: Ledger, w1: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id, look = put(ledger), ledger.jobs.positions

    def look_and_begin(job_ids: Collection[int]) -> list[JobPosition]:
        found = look(job_ids)
        claim_jobs(ledger, start=1)
        return found

    monkeypatch.setattr(ledger.jobs, "positions", look_and_begin)
    settings = Settings(mdp=MdpSettings(request_ttl="1ms"))
    runner, answer = BatchRunner(ledger, settings, Reaper(ledger, Recovery(), by="test")), BatchResult()
    for step in runner.steps(Batch(overdue=[job_id]), answer):
        step.do()
    assert answer.expired == []
    assert state_of(ledger, job_id) is JobState.RUNNING
    assert [held.cancel_requested for held in ledger.workers.held(w1)] == [False]
