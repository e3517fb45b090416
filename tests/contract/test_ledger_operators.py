"""What operators do: pause, cancel, retry, purge; each answer says what became of each job."""

import pytest
from tests.contract.hands import (
    claim,
    crash,
    crash_retry,
    done,
    failure,
    new_job,
    put,
    run,
    running,
    state_of,
    turn,
)

from unstuck.domain.endings import Ending, JobError
from unstuck.domain.states import AttemptState, JobState
from unstuck.store.contract import Ledger
from unstuck.store.records import Held


def test_cancelling_says_what_became_of_each(ledger: Ledger, w1: str) -> None:
    finished = running(ledger)
    turn(ledger, done=[done(finished)])
    ran = running(ledger)
    put(ledger)
    [claimed] = claim(ledger)
    waiting, later = put(ledger), put(ledger, delay_s=60.0)
    ids = [finished.job_id, ran.job_id, claimed.job_id, waiting, later, 999_999]
    assert ledger.cancel(ids, "ops") == {
        finished.job_id: "finished",
        ran.job_id: "requested",
        claimed.job_id: "cancelled",
        waiting: "cancelled",
        later: "cancelled",
        999_999: "missing",
    }
    assert state_of(ledger, finished.job_id) is JobState.SUCCEEDED
    assert state_of(ledger, ran.job_id) is JobState.RUNNING
    outcomes = ledger.outcomes([claimed.job_id, waiting, later])
    assert len(outcomes) == 3
    for outcome in outcomes:
        assert outcome.state is JobState.CANCELLED
        assert outcome.error is not None
        assert outcome.error.code == "CANCELLED"
        assert "ops" in (outcome.error.cause or "")
    assert claim(ledger) == []


def test_a_worker_can_not_start_what_was_cancelled_in_its_hands(ledger: Ledger, w1: str) -> None:
    put(ledger)
    [job] = claim(ledger)
    ledger.cancel([job.job_id], "ops")
    assert turn(ledger, start=[Held(job.job_id, job.token)]).superseded == {(job.job_id, job.token)}
    assert ledger.held("w1") == []


def test_a_running_job_shows_that_somebody_wants_it_cancelled(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    ledger.cancel([job.job_id], "ops")
    record = ledger.job(job.job_id)
    assert record is not None
    assert record.cancel_requested
    assert [held.cancel_requested for held in ledger.held("w1")] == [True]
    assert ledger.events(job_id=job.job_id)[-1].kind == "cancel_requested"


def test_a_running_job_that_finishes_anyway_has_succeeded(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    ledger.cancel([job.job_id], "ops")
    turn(ledger, done=[done(job)])
    assert state_of(ledger, job.job_id) is JobState.SUCCEEDED


def test_cancelling_frees_the_unique_key(ledger: Ledger) -> None:
    job_id = put(ledger, unique_key="once")
    ledger.cancel([job_id], "ops")
    assert ledger.enqueue([new_job(unique_key="once")])[0].fresh


def test_retrying_says_what_became_of_each(ledger: Ledger, w1: str) -> None:
    succeeded = running(ledger)
    turn(ledger, done=[done(succeeded)])
    failed = running(ledger)
    turn(ledger, endings=[failure(failed)])
    live = put(ledger)
    keyed = put(ledger, unique_key="once")
    ledger.cancel([keyed], "ops")
    ledger.enqueue([new_job(unique_key="once")])
    assert ledger.retry([succeeded.job_id, failed.job_id, live, keyed, 999_999], "ops") == {
        succeeded.job_id: "succeeded",
        failed.job_id: "queued",
        live: "live",
        keyed: "duplicate",
        999_999: "missing",
    }
    assert state_of(ledger, keyed) is JobState.CANCELLED


def test_a_retried_job_starts_with_fresh_counters_and_keeps_its_history(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    turn(ledger, endings=[crash_retry(job)])
    [again] = run(ledger)
    error = JobError("CRASHED_TOO_OFTEN", "too often", "signal 11")
    ending = Ending(again.job_id, again.token, JobState.QUARANTINED, AttemptState.CRASHED, error=error, counter="crash")
    turn(ledger, endings=[ending])
    assert ledger.retry([job.job_id], "ops") == {job.job_id: "queued"}
    record = ledger.job(job.job_id)
    assert record is not None
    assert (record.state, record.failures, record.crash_count) == (JobState.PENDING, 0, 0)
    assert (record.error, record.finished_at, record.result, record.worker_id) == (None, None, None, None)
    assert not record.cancel_requested
    assert [(a.token, a.code) for a in ledger.attempts(job.job_id)] == [
        (job.token, "WORKER_CRASHED"),
        (again.token, "CRASHED_TOO_OFTEN"),
    ]
    assert ledger.events(job_id=job.job_id)[-1].kind == "retried"
    [third] = run(ledger)
    turn(ledger, done=[done(third)])
    assert [a.state for a in ledger.attempts(job.job_id)] == [
        AttemptState.CRASHED,
        AttemptState.CRASHED,
        AttemptState.SUCCEEDED,
    ]


def test_a_retried_job_holds_its_unique_key_again(ledger: Ledger, w1: str) -> None:
    job = running(ledger, unique_key="once")
    turn(ledger, endings=[crash(job)])
    ledger.retry([job.job_id], "ops")
    assert ledger.enqueue([new_job(unique_key="once")])[0].job_id == job.job_id


def test_a_job_cancelled_before_it_ran_can_be_retried(ledger: Ledger, w1: str) -> None:
    job_id = put(ledger)
    ledger.cancel([job_id], "ops")
    assert ledger.retry([job_id], "ops") == {job_id: "queued"}
    assert ledger.attempts(job_id) == []
    assert [job.job_id for job in claim(ledger)] == [job_id]


def test_purging_cancels_everything_that_waits_in_one_queue(ledger: Ledger, w1: str) -> None:
    ran = running(ledger)
    ids = [put(ledger), put(ledger, delay_s=60.0), put(ledger, unique_key="once")]
    other = put(ledger, queue="other")
    assert ledger.purge("default", "ops") == 3
    assert [state_of(ledger, job_id) for job_id in ids] == [JobState.CANCELLED] * 3
    assert state_of(ledger, ran.job_id) is JobState.RUNNING
    assert state_of(ledger, other) is JobState.PENDING
    assert {outcome.error.code for outcome in ledger.outcomes(ids) if outcome.error} == {"CANCELLED"}
    assert "purged" in [event.kind for event in ledger.events()]
    assert ledger.purge("default", "ops") == 0
    assert ledger.purge("no-such-queue", "ops") == 0


def test_pausing_all_pauses_every_known_queue_once(ledger: Ledger, w1: str) -> None:
    put(ledger, queue="a"), put(ledger, queue="b")
    assert ledger.pause("a", "ops") == ["a"]
    assert ledger.pause("a", "ops") == []
    assert set(ledger.pause(None, "ops")) == {"b", "default"}
    assert claim(ledger, queues=("a", "b", "default")) == []
    assert [(queue.name, queue.paused) for queue in ledger.queues()] == [("a", True), ("b", True), ("default", True)]
    assert set(ledger.resume(None, "ops")) == {"a", "b", "default"}
    assert ledger.resume(None, "ops") == []
    kinds = [event.kind for event in ledger.events()]
    assert kinds.count("queue_paused") == kinds.count("queue_resumed") == 3


def test_a_queue_can_be_paused_before_it_exists(ledger: Ledger, w1: str) -> None:
    assert ledger.pause("tomorrow", "ops") == ["tomorrow"]
    put(ledger, queue="tomorrow")
    assert claim(ledger, queues=("tomorrow",)) == []
    assert [queue.name for queue in ledger.queues() if queue.paused] == ["tomorrow"]


def test_a_paused_queue_lets_running_jobs_finish(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    ledger.pause("default", "ops")
    assert turn(ledger, done=[done(job)]).superseded == frozenset()


@pytest.mark.parametrize("verb", ["cancel", "retry"])
def test_no_ids_no_answers(ledger: Ledger, verb: str) -> None:
    assert getattr(ledger, verb)([], "ops") == {}
