"""How attempts end: counters, history, errors, releases, outputs, events."""

import time

import msgspec
import pytest
from tests.support.backdoor import Backdoor
from tests.support.builders import (
    claim_jobs,
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
    verdict,
)
from tests.support.fleet import wait_for

from unstuck.config import Recovery
from unstuck.domain.autopsy import Autopsy, DeathKind, LastWords, ProgressMark
from unstuck.domain.endings import Ending, JobError
from unstuck.domain.liveness import Detector
from unstuck.domain.states import AttemptState, JobState
from unstuck.errors import RefusedValue
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.jobs import Outcome, Progress
from unstuck.ledger.contract.recovery import GuardNone
from unstuck.ledger.contract.workers import Output
from unstuck.recovery.reap import Reaper


def test_a_success_is_written_with_its_result(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    assert ledger.jobs.outcomes([job.job_id]) == []
    turn(ledger, done=[done(job, b"\x00result")])
    assert ledger.jobs.outcomes([job.job_id]) == [Outcome(job.job_id, JobState.SUCCEEDED, b"\x00result", None)]
    record = ledger.jobs.get(job.job_id)
    assert record is not None
    assert record.error is None
    assert record.finished_at == pytest.approx(time.time(), abs=5)
    assert (record.worker_id, record.token, record.attempt) == ("w1", job.token, 1)


def test_a_crash_is_kept_with_code_message_cause_and_details(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    error = JobError("OUT_OF_MEMORY", "Worker died unexpectedly", "killed by the kernel", {"rss": 5, "héap": ["x"]})
    turn(ledger, endings=[crash(job, error=error)])
    [outcome] = ledger.jobs.outcomes([job.job_id])
    assert (outcome.state, outcome.error) == (JobState.FAILED, error)
    [attempt] = ledger.jobs.attempts(job.job_id)
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
    [again] = claim_jobs(ledger)
    assert (again.failures, again.crashes, again.attempt) == (failures, crashes, 2)


def test_earlier_attempts_are_history_and_the_last_one_is_too(ledger: Ledger, w1: str, w2: str) -> None:
    first = running(ledger)
    turn(ledger, endings=[failure_retry(first)])
    [second] = run(ledger, "w2")
    turn(ledger, "w2", endings=[crash_retry(second)])
    [third] = run(ledger)
    now = ledger.jobs.attempts(first.job_id)
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
    after = ledger.jobs.attempts(first.job_id)
    assert [a.state for a in after] == [AttemptState.FAILED, AttemptState.CRASHED, AttemptState.SUCCEEDED]
    assert after[2].ended_at is not None
    record = ledger.jobs.get(first.job_id)
    assert record is not None
    assert (record.attempt, record.failures, record.crash_count, record.error) == (3, 1, 1, None)


def test_a_job_that_is_tried_again_belongs_to_nobody_meanwhile(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    turn(ledger, endings=[crash_retry(job, delay_s=60)])
    record = ledger.jobs.get(job.job_id)
    assert record is not None
    assert (record.state, record.worker_id, record.token, record.started_at) == (JobState.PENDING, None, None, None)
    assert record.run_at == pytest.approx(time.time() + 60, abs=5)
    assert ledger.workers.held("w1") == []
    assert claim_jobs(ledger) == []


def test_a_crashed_job_goes_back_to_the_front_of_its_line(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    later = put(ledger)
    turn(ledger, endings=[crash_retry(job)])
    assert [again.job_id for again in claim_jobs(ledger)] == [job.job_id, later]


def test_giving_back_what_was_only_claimed_costs_nothing(ledger: Ledger, w1: str) -> None:
    put(ledger)
    [job] = claim_jobs(ledger)
    turn(ledger, release=[release(job, event="requeued", message="Task re-queued due to stale worker: w1")])
    record = ledger.jobs.get(job.job_id)
    assert record is not None
    assert (record.state, record.attempt, record.failures, record.crash_count) == (JobState.PENDING, 0, 0, 0)
    assert record.worker_id is None
    assert ledger.jobs.attempts(job.job_id) == []
    [event] = ledger.events.list(job_id=job.job_id)
    assert (event.kind, event.message) == ("requeued", "Task re-queued due to stale worker: w1")
    [again] = claim_jobs(ledger)
    assert again.attempt == 1


def test_giving_back_what_was_started_but_never_entered_takes_the_attempt_back(ledger: Ledger, w1: str) -> None:
    put(ledger, on_crash="retry")
    [job] = claim_jobs(ledger, run_ahead=True)
    assert job.running
    turn(ledger, release=[release(job)])
    record = ledger.jobs.get(job.job_id)
    assert record is not None
    assert (record.state, record.attempt) == (JobState.PENDING, 0)
    assert ledger.jobs.attempts(job.job_id) == []
    assert ledger.events.list(job_id=job.job_id) == []
    [again] = claim_jobs(ledger, run_ahead=True)
    assert again.attempt == 1


def test_the_plain_way_writes_no_events(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    turn(ledger, done=[done(job)])
    assert ledger.events.list(job_id=job.job_id) == []


def test_an_ending_tells_its_event_and_who_held_the_job(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    turn(ledger, endings=[failure(job)])
    [event] = ledger.events.list(job_id=job.job_id)
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
    record = ledger.jobs.get(job.job_id)
    assert record is not None
    assert (record.state, record.crash_count) == (JobState.QUARANTINED, 2)
    assert [attempt.state for attempt in ledger.jobs.attempts(job.job_id)] == [
        AttemptState.CRASHED,
        AttemptState.CRASHED,
    ]


def test_a_drained_attempt_counts_for_nobody(ledger: Ledger, w1: str) -> None:
    job = running(ledger, on_crash="retry")
    drained = Ending(job.job_id, job.token, JobState.PENDING, AttemptState.DRAINED, event="requeued", message="drain")
    turn(ledger, endings=[drained])
    [again] = claim_jobs(ledger)
    assert (again.failures, again.crashes) == (0, 0)
    assert ledger.jobs.attempts(job.job_id)[0].state is AttemptState.DRAINED


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
    found = [(output.token, output.stdout, output.stderr) for output in ledger.jobs.outputs(first.job_id)]
    assert found == [(first.token, b"one\0", b""), (second.token, b"two", b"\xffwarn")]


def test_a_superseded_attempt_can_not_leave_its_output(ledger: Ledger, w1: str, w2: str) -> None:
    job = running(ledger)
    turn(ledger, "w2", done=[done(job)], outputs=[Output(job.job_id, job.token, b"forged", b"")])
    assert ledger.jobs.outputs(job.job_id) == []


def test_a_cancelled_job_does_not_go_back_to_the_queue(ledger: Ledger, w1: str) -> None:
    put(ledger, on_crash="retry"), put(ledger, on_crash="retry")
    ended, given_back = run(ledger)
    ledger.jobs.cancel([ended.job_id, given_back.job_id], "ops")
    turn(ledger, endings=[crash_retry(ended)], release=[release(given_back)])
    assert [outcome.state for outcome in ledger.jobs.outcomes([ended.job_id, given_back.job_id])] == [
        JobState.CANCELLED
    ] * 2
    assert {
        outcome.error.code for outcome in ledger.jobs.outcomes([ended.job_id, given_back.job_id]) if outcome.error
    } == {"CANCELLED"}
    assert claim_jobs(ledger) == []


def test_outcomes_and_missing_tell_the_finished_from_the_unknown(ledger: Ledger, w1: str) -> None:
    finished = running(ledger)
    turn(ledger, done=[done(finished)])
    waiting = put(ledger)
    ids = [finished.job_id, waiting, 10_000_000]
    assert [outcome.job_id for outcome in ledger.jobs.outcomes(ids)] == [finished.job_id]
    assert ledger.jobs.missing(ids) == {10_000_000}
    assert ledger.jobs.outcomes([]) == []
    assert ledger.jobs.missing([]) == set()


def test_settling_writes_what_a_turn_would(ledger: Ledger, w1: str) -> None:
    put(ledger), put(ledger)
    first, second = run(ledger)
    put(ledger)
    [claimed] = claim_jobs(ledger)
    written = ledger.recovery.settle("w1", [crash(first), crash_retry(second)], [release(claimed)], GuardNone())
    assert written == {(job.job_id, job.token) for job in (first, second, claimed)}
    assert [state_of(ledger, job.job_id) for job in (first, second, claimed)] == [
        JobState.FAILED,
        JobState.PENDING,
        JobState.PENDING,
    ]
    assert ledger.workers.held("w1") == []


DEATH = Autopsy(
    kind=DeathKind.SIGNAL,
    summary="killed by SIGSEGV (signal 11)",
    detector=Detector.RUNNER,
    seen_after_s=0.004,
    signal="SIGSEGV",
    pid=4711,
    memory_bytes=80_000_000,
    max_memory_bytes=123_000_000,
    cpu_s=1.25,
    stack='Current thread 0x1 (most recent call first):\n  File "a.py", line 3 in spin',
    stderr="ümlaut\nlast words",
    progress=ProgressMark(3, 10, "third of ten", 1_700_000_000.0),
    beside=(7, 8),
    beside_count=2,
    rule='on_crash="fail"',
)


def test_the_autopsy_of_a_last_attempt_is_kept_with_it(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    turn(ledger, endings=[crash(job, autopsy=DEATH)])
    [attempt] = ledger.jobs.attempts(job.job_id)
    assert attempt.autopsy == DEATH


def test_each_of_several_deaths_keeps_its_own_autopsy(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    turn(ledger, endings=[crash_retry(job, autopsy=DEATH)])
    [again] = run(ledger)
    turn(ledger, done=[done(again)])
    first, last = ledger.jobs.attempts(job.job_id)
    assert (first.autopsy, last.autopsy) == (DEATH, None)


def test_a_reaper_writes_an_autopsy_too(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    ledger.recovery.settle("w1", [crash(job, autopsy=DEATH)], [], GuardNone())
    assert ledger.jobs.attempts(job.job_id)[0].autopsy == DEATH


def test_a_zombie_cannot_explain_what_is_no_longer_its_own(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    turn(ledger, endings=[crash_retry(job)])
    answer = turn(ledger, endings=[crash(job, autopsy=DEATH)])
    assert answer.superseded == {(job.job_id, job.token)}
    assert [attempt.autopsy for attempt in ledger.jobs.attempts(job.job_id)] == [None]


def test_autopsies_go_with_their_job(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    ledger.workers.note_progress("w1", [Progress(job.job_id, job.token, 5.0, 1, 2, "half")])
    turn(ledger, endings=[crash(job, autopsy=DEATH)])
    assert wait_for(lambda: ledger.maintenance.prune(0.0), "something to prune") == 1
    assert ledger.jobs.attempts(job.job_id) == []
    assert ledger.jobs.progress([job.job_id]) == {}


def test_the_verdict_on_a_worker_keeps_its_autopsy(ledger: Ledger, w1: str) -> None:
    assert ledger.recovery.declare_dead("w1", verdict(autopsy=DEATH), GuardNone())
    [worker] = ledger.workers.list()
    assert worker.verdict is not None
    assert worker.verdict.autopsy == DEATH


def test_who_knows_more_of_a_death_adds_to_the_verdict_on_it(ledger: Ledger, w1: str) -> None:
    more = verdict(evidence="killed by SIGSEGV", autopsy=DEATH)
    assert not ledger.recovery.amend_verdict("w1", more), "it lives"
    assert ledger.recovery.declare_dead("w1", verdict(), GuardNone())
    assert ledger.recovery.amend_verdict("w1", more)
    [worker] = ledger.workers.list()
    assert worker.verdict == more
    assert not ledger.recovery.amend_verdict("nobody", more)


def test_a_death_in_company_makes_a_suspect_that_must_run_alone(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    assert job.suspected_crashes == 0
    turn(ledger, endings=[crash_retry(job, counter="suspicion")])
    [again] = run(ledger)
    assert (again.suspected_crashes, again.run_alone, again.crashes) == (1, True, 0)
    assert [held.suspected_crashes for held in ledger.workers.held("w1")] == [1]
    record = ledger.jobs.get(job.job_id)
    assert record is not None
    assert (record.suspected_crashes, record.run_alone, record.crash_count) == (1, True, 0)


def test_whoever_was_lost_with_a_whole_worker_is_no_suspect(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    turn(ledger, endings=[crash_retry(job, counter="company")])
    [again] = run(ledger)
    assert (again.suspected_crashes, again.run_alone, again.crashes) == (1, False, 0)


@pytest.mark.parametrize(("state", "alone"), [(JobState.QUARANTINED, True), (JobState.FAILED, False)], ids=str)
def test_what_was_quarantined_runs_alone_when_it_is_let_go(
    ledger: Ledger, w1: str, state: JobState, alone: bool
) -> None:
    job = running(ledger)
    turn(ledger, endings=[crash_retry(job, counter="suspicion")])
    [again] = run(ledger)
    turn(ledger, endings=[msgspec.structs.replace(crash(again), state=state)])
    assert ledger.jobs.retry([job.job_id], "op") == {job.job_id: "queued"}
    [free] = claim_jobs(ledger)
    assert (free.run_alone, free.suspected_crashes, free.crashes) == (alone, 0, 0)


def test_progress_is_kept_and_replaced(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    other = put(ledger)
    ledger.workers.note_progress("w1", [Progress(job.job_id, job.token, 5.0, 1, 10, "one", 4.0)])
    ledger.workers.note_progress("w1", [Progress(job.job_id, job.token, 6.0, 2, 10, "zwei")])
    assert ledger.jobs.progress([job.job_id, other]) == {
        job.job_id: Progress(job.job_id, job.token, 6.0, 2, 10, "zwei")
    }


def test_only_the_attempt_that_runs_can_note_progress(ledger: Ledger, w1: str, w2: str) -> None:
    job = running(ledger)
    ledger.workers.note_progress("w2", [Progress(job.job_id, job.token, 5.0, 1, 10, "a zombie")])
    ledger.workers.note_progress("w1", [Progress(job.job_id, job.token + 1, 5.0, 1, 10, "another token")])
    assert ledger.jobs.progress([job.job_id]) == {}
    turn(ledger, done=[done(job)])
    ledger.workers.note_progress("w1", [Progress(job.job_id, job.token, 5.0, 1, 10, "too late")])
    assert ledger.jobs.progress([job.job_id]) == {}


@pytest.mark.parametrize(
    "news",
    [
        {"detector": "oracle"},
        {"autopsy": {"kind": "gamma_ray", "summary": "hit", "detector": "runner"}},
        {"autopsy": {"kind": "signal", "summary": "hit", "detector": "oracle"}, "mood": "grim"},
    ],
)
def test_a_verdict_of_a_newer_version_breaks_neither_the_list_nor_the_round(
    ledger: Ledger, w1: str, w2: str, meddler: Backdoor, news: dict[str, object]
) -> None:
    job = running(ledger)
    assert ledger.recovery.declare_dead("w1", verdict(autopsy=DEATH), GuardNone())
    stored = msgspec.json.encode({**msgspec.to_builtins(verdict()), **news}).decode()
    table = "unstuck_workers" if meddler.dialect == "sqlite" else "workers"
    meddler.rows(f"update {table} set verdict = '{stored}' where id = 'w1'")
    dead = next(worker for worker in ledger.workers.list() if worker.id == "w1")
    assert dead.verdict is not None
    assert "no heartbeat" in dead.verdict.evidence
    assert [one.id for one in ledger.workers.standings()] == ["w2"]
    Reaper(ledger, Recovery(), by="test").sweep(ticket=False)
    assert state_of(ledger, job.job_id) is JobState.FAILED


def test_what_a_dead_worker_said_last_cannot_keep_its_death_from_being_written(ledger: Ledger, w1: str) -> None:
    death = msgspec.structs.replace(DEATH, stderr="a\0b", stack="x\0\udc80")
    Reaper(ledger, Recovery(), by="test").report_death("w1", Detector.SUPERVISOR, "its supervisor saw it end", death)
    [worker] = ledger.workers.list()
    assert worker.verdict is not None
    assert worker.verdict.autopsy is not None
    assert worker.verdict.autopsy.stderr == "a\\x00b"


def test_a_last_death_in_company_is_counted_alike_in_every_ledger(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    turn(ledger, endings=[msgspec.structs.replace(crash(job), counter="suspicion")])
    record = ledger.jobs.get(job.job_id)
    assert record is not None
    assert (record.suspected_crashes, record.run_alone, record.crash_count) == (1, True, 0)


def test_last_words_that_are_found_later_are_added_to_a_report_that_misses_them(ledger: Ledger, w1: str) -> None:
    whole, lacking = running(ledger), running(ledger)
    gone = Autopsy(DeathKind.LOST_HEARTBEAT, "silent", Detector.LEASE, stdout="known")
    turn(
        ledger,
        endings=[
            crash(whole, autopsy=gone),
            crash(lacking, autopsy=msgspec.structs.replace(gone, stdout="", missing="Nobody was left.")),
        ],
    )
    mark = ProgressMark(137, 150, "nearly", 5.0)
    found = [LastWords(one.job_id, one.token, mark, "é last line", "", 4096) for one in (whole, lacking)]
    for _ in range(2):
        ledger.recovery.add_last_words([*found, LastWords(999_999, 1, None, "nobody's")])
    [first], [second] = ledger.jobs.attempts(whole.job_id), ledger.jobs.attempts(lacking.job_id)
    assert first.autopsy == gone
    assert second.autopsy is not None
    assert (second.autopsy.stdout, second.autopsy.missing) == ("é last line", "")
    assert (second.autopsy.progress, second.autopsy.memory_bytes) == (mark, 4096)
    assert (second.autopsy.kind, second.autopsy.summary) == (gone.kind, gone.summary)
