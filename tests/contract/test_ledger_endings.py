"""How attempts end: counters, history, errors, releases, outputs, events."""

import time

import pytest
from tests.contract.hands import (
    claim,
    crash,
    crash_retry,
    done,
    failure,
    failure_retry,
    put,
    release,
    run,
    running,
    state_of,
    turn,
)

from unstuck.domain.endings import Ending, JobError
from unstuck.domain.errors import RefusedValue
from unstuck.domain.states import AttemptState, JobState
from unstuck.store.contract import Ledger
from unstuck.store.records import GuardNone, Outcome, Output


def test_a_success_is_written_with_its_result(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    assert ledger.outcomes([job.job_id]) == []
    turn(ledger, done=[done(job, b"\x00result")])
    assert ledger.outcomes([job.job_id]) == [Outcome(job.job_id, JobState.SUCCEEDED, b"\x00result", None)]
    record = ledger.job(job.job_id)
    assert record is not None
    assert record.error is None
    assert record.finished_at == pytest.approx(time.time(), abs=5)
    assert (record.worker_id, record.token, record.attempt) == ("w1", job.token, 1)


def test_a_crash_is_kept_with_code_message_cause_and_details(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    error = JobError("OUT_OF_MEMORY", "Worker died unexpectedly", "killed by the kernel", {"rss": 5, "héap": ["x"]})
    turn(ledger, endings=[crash(job, error=error)])
    [outcome] = ledger.outcomes([job.job_id])
    assert (outcome.state, outcome.error) == (JobState.FAILED, error)
    [attempt] = ledger.attempts(job.job_id)
    assert (attempt.state, attempt.code, attempt.cause) == (
        AttemptState.CRASHED,
        "OUT_OF_MEMORY",
        "killed by the kernel",
    )


@pytest.mark.parametrize(
    ("counter", "failures", "crashes"), [("none", 0, 0), ("failure", 1, 0), ("crash", 0, 1)], ids=str
)
def test_each_counter_counts_for_itself(ledger: Ledger, w1: str, counter: str, failures: int, crashes: int) -> None:
    job = running(ledger)
    turn(ledger, endings=[crash_retry(job, counter=counter)])
    [again] = claim(ledger)
    assert (again.failures, again.crashes, again.attempt) == (failures, crashes, 2)


def test_earlier_attempts_are_history_and_the_last_one_is_too(ledger: Ledger, w1: str, w2: str) -> None:
    first = running(ledger)
    turn(ledger, endings=[failure_retry(first)])
    [second] = run(ledger, "w2")
    turn(ledger, "w2", endings=[crash_retry(second)])
    [third] = run(ledger)
    now = ledger.attempts(first.job_id)
    assert [(a.token, a.worker_id, a.state) for a in now] == [
        (first.token, "w1", AttemptState.FAILED),
        (second.token, "w2", AttemptState.CRASHED),
        (third.token, "w1", AttemptState.RUNNING),
    ]
    assert [a.code for a in now] == ["TASK_FAILED", "WORKER_CRASHED", None]
    assert now[0].cause == "because"
    assert now[2].ended_at is None
    for attempt in now:
        assert attempt.started_at is not None
        assert attempt.last_heartbeat_at == pytest.approx(time.time(), abs=30)
    turn(ledger, done=[done(third)])
    after = ledger.attempts(first.job_id)
    assert [a.state for a in after] == [AttemptState.FAILED, AttemptState.CRASHED, AttemptState.SUCCEEDED]
    assert after[2].ended_at is not None
    record = ledger.job(first.job_id)
    assert record is not None
    assert (record.attempt, record.failures, record.crash_count, record.error) == (3, 1, 1, None)


def test_a_job_that_is_tried_again_belongs_to_nobody_meanwhile(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    turn(ledger, endings=[crash_retry(job, delay_s=60)])
    record = ledger.job(job.job_id)
    assert record is not None
    assert (record.state, record.worker_id, record.token, record.started_at) == (JobState.PENDING, None, None, None)
    assert record.run_at == pytest.approx(time.time() + 60, abs=5)
    assert ledger.held("w1") == []
    assert claim(ledger) == []


def test_a_crashed_job_goes_back_to_the_front_of_its_line(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    later = put(ledger)
    turn(ledger, endings=[crash_retry(job)])
    assert [again.job_id for again in claim(ledger)] == [job.job_id, later]


def test_giving_back_what_was_only_claimed_costs_nothing(ledger: Ledger, w1: str) -> None:
    put(ledger)
    [job] = claim(ledger)
    turn(ledger, release=[release(job, event="requeued", message="Task re-queued due to stale worker: w1")])
    record = ledger.job(job.job_id)
    assert record is not None
    assert (record.state, record.attempt, record.failures, record.crash_count) == (JobState.PENDING, 0, 0, 0)
    assert record.worker_id is None
    assert ledger.attempts(job.job_id) == []
    [event] = ledger.events(job_id=job.job_id)
    assert (event.kind, event.message) == ("requeued", "Task re-queued due to stale worker: w1")
    [again] = claim(ledger)
    assert again.attempt == 1


def test_giving_back_what_was_started_but_never_entered_takes_the_attempt_back(ledger: Ledger, w1: str) -> None:
    put(ledger, on_crash="retry")
    [job] = claim(ledger, run_ahead=True)
    assert job.running
    turn(ledger, release=[release(job)])
    record = ledger.job(job.job_id)
    assert record is not None
    assert (record.state, record.attempt) == (JobState.PENDING, 0)
    assert ledger.attempts(job.job_id) == []
    assert ledger.events(job_id=job.job_id) == []
    [again] = claim(ledger, run_ahead=True)
    assert again.attempt == 1


def test_the_plain_way_writes_no_events(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    turn(ledger, done=[done(job)])
    assert ledger.events(job_id=job.job_id) == []


def test_an_ending_tells_its_event_and_who_held_the_job(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    turn(ledger, endings=[failure(job)])
    [event] = ledger.events(job_id=job.job_id)
    assert (event.kind, event.job_id, event.worker_id, event.message) == (
        "failed",
        job.job_id,
        "w1",
        "TASK_FAILED: boom",
    )


def test_quarantine_keeps_the_list_of_what_the_job_killed(ledger: Ledger, w1: str) -> None:
    job = running(ledger, on_crash="retry")
    turn(ledger, endings=[crash_retry(job)])
    [again] = run(ledger)
    error = JobError("CRASHED_TOO_OFTEN", "Job killed its process 2 times and is quarantined", "signal 9")
    ending = Ending(again.job_id, again.token, JobState.QUARANTINED, AttemptState.CRASHED, error=error, counter="crash")
    turn(ledger, endings=[ending])
    record = ledger.job(job.job_id)
    assert record is not None
    assert (record.state, record.crash_count) == (JobState.QUARANTINED, 2)
    assert [attempt.state for attempt in ledger.attempts(job.job_id)] == [AttemptState.CRASHED, AttemptState.CRASHED]


def test_a_drained_attempt_counts_for_nobody(ledger: Ledger, w1: str) -> None:
    job = running(ledger, on_crash="retry")
    drained = Ending(job.job_id, job.token, JobState.PENDING, AttemptState.DRAINED, event="requeued", message="drain")
    turn(ledger, endings=[drained])
    [again] = claim(ledger)
    assert (again.failures, again.crashes) == (0, 0)
    assert ledger.attempts(job.job_id)[0].state is AttemptState.DRAINED


@pytest.mark.parametrize("text", ["nul \0 inside", "lone \ud800 surrogate"])
def test_an_outcome_that_cannot_be_stored_is_refused_and_its_neighbours_can_go_on(
    ledger: Ledger, w1: str, text: str
) -> None:
    put(ledger), put(ledger)
    good, bad = run(ledger)
    poison = crash(bad, error=JobError("TASK_FAILED", text))
    with pytest.raises(RefusedValue):
        turn(ledger, done=[done(good)], endings=[poison])
    assert [state_of(ledger, job.job_id) for job in (good, bad)] == [JobState.RUNNING, JobState.RUNNING]
    assert turn(ledger, done=[done(good)]).superseded == frozenset()
    with pytest.raises(RefusedValue):
        turn(ledger, endings=[poison])
    assert turn(ledger, endings=[crash(bad)]).superseded == frozenset()


def test_what_a_job_printed_is_kept_with_its_attempt(ledger: Ledger, w1: str) -> None:
    first = running(ledger)
    turn(ledger, endings=[crash_retry(first)], outputs=[Output(first.job_id, first.token, b"one\0", b"")])
    [second] = run(ledger)
    turn(ledger, done=[done(second)], outputs=[Output(second.job_id, second.token, b"two", b"\xffwarn")])
    found = [(output.token, output.stdout, output.stderr) for output in ledger.outputs(first.job_id)]
    assert found == [(first.token, b"one\0", b""), (second.token, b"two", b"\xffwarn")]


def test_a_superseded_attempt_can_not_leave_its_output(ledger: Ledger, w1: str, w2: str) -> None:
    job = running(ledger)
    turn(ledger, "w2", done=[done(job)], outputs=[Output(job.job_id, job.token, b"forged", b"")])
    assert ledger.outputs(job.job_id) == []


def test_a_cancelled_job_does_not_go_back_to_the_queue(ledger: Ledger, w1: str) -> None:
    put(ledger, on_crash="retry"), put(ledger, on_crash="retry")
    ended, given_back = run(ledger)
    ledger.cancel([ended.job_id, given_back.job_id], "ops")
    turn(ledger, endings=[crash_retry(ended)], release=[release(given_back)])
    assert [outcome.state for outcome in ledger.outcomes([ended.job_id, given_back.job_id])] == [JobState.CANCELLED] * 2
    assert {outcome.error.code for outcome in ledger.outcomes([ended.job_id, given_back.job_id]) if outcome.error} == {
        "CANCELLED"
    }
    assert claim(ledger) == []


def test_outcomes_and_missing_tell_the_finished_from_the_unknown(ledger: Ledger, w1: str) -> None:
    finished = running(ledger)
    turn(ledger, done=[done(finished)])
    waiting = put(ledger)
    ids = [finished.job_id, waiting, 10_000_000]
    assert [outcome.job_id for outcome in ledger.outcomes(ids)] == [finished.job_id]
    assert ledger.missing(ids) == {10_000_000}
    assert ledger.outcomes([]) == []
    assert ledger.missing([]) == set()


def test_settling_writes_what_a_turn_would(ledger: Ledger, w1: str) -> None:
    put(ledger), put(ledger)
    first, second = run(ledger)
    put(ledger)
    [claimed] = claim(ledger)
    written = ledger.settle("w1", [crash(first), crash_retry(second)], [release(claimed)], GuardNone())
    assert written == {(job.job_id, job.token) for job in (first, second, claimed)}
    assert [state_of(ledger, job.job_id) for job in (first, second, claimed)] == [
        JobState.FAILED,
        JobState.PENDING,
        JobState.PENDING,
    ]
    assert ledger.held("w1") == []
