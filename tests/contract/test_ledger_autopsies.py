"""Why attempts died is kept with them; how far they said they were; and who must run alone next."""

import msgspec
import pytest
from tests.contract.hands import claim, crash, crash_retry, done, put, run, running, state_of, turn, verdict
from tests.contract.meddling import Meddler
from tests.fleet import wait_for

from unstuck.config import Recovery
from unstuck.domain.autopsy import Autopsy, DeathKind, LastWords, ProgressMark
from unstuck.domain.liveness import Detector
from unstuck.domain.states import JobState
from unstuck.reaper.sweep import Reaper
from unstuck.store.contract import Ledger
from unstuck.store.records import GuardNone, Progress

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
    [attempt] = ledger.attempts(job.job_id)
    assert attempt.autopsy == DEATH


def test_each_of_several_deaths_keeps_its_own_autopsy(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    turn(ledger, endings=[crash_retry(job, autopsy=DEATH)])
    [again] = run(ledger)
    turn(ledger, done=[done(again)])
    first, last = ledger.attempts(job.job_id)
    assert (first.autopsy, last.autopsy) == (DEATH, None)


def test_a_reaper_writes_an_autopsy_too(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    ledger.settle("w1", [crash(job, autopsy=DEATH)], [], GuardNone())
    assert ledger.attempts(job.job_id)[0].autopsy == DEATH


def test_a_zombie_cannot_explain_what_is_no_longer_its_own(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    turn(ledger, endings=[crash_retry(job)])
    answer = turn(ledger, endings=[crash(job, autopsy=DEATH)])
    assert answer.superseded == {(job.job_id, job.token)}
    assert [attempt.autopsy for attempt in ledger.attempts(job.job_id)] == [None]


def test_autopsies_go_with_their_job(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    ledger.note_progress("w1", [Progress(job.job_id, job.token, 5.0, 1, 2, "half")])
    turn(ledger, endings=[crash(job, autopsy=DEATH)])
    assert wait_for(lambda: ledger.prune(0.0), "something to prune") == 1
    assert ledger.attempts(job.job_id) == []
    assert ledger.progress([job.job_id]) == {}


def test_the_verdict_on_a_worker_keeps_its_autopsy(ledger: Ledger, w1: str) -> None:
    assert ledger.condemn("w1", verdict(autopsy=DEATH), GuardNone())
    [worker] = ledger.workers()
    assert worker.verdict is not None
    assert worker.verdict.autopsy == DEATH


def test_who_knows_more_of_a_death_adds_to_the_verdict_on_it(ledger: Ledger, w1: str) -> None:
    more = verdict(evidence="killed by SIGSEGV", autopsy=DEATH)
    assert not ledger.amend("w1", more), "it lives"
    assert ledger.condemn("w1", verdict(), GuardNone())
    assert ledger.amend("w1", more)
    [worker] = ledger.workers()
    assert worker.verdict == more
    assert not ledger.amend("nobody", more)


def test_a_death_in_company_makes_a_suspect_that_must_run_alone(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    assert job.suspicions == 0
    turn(ledger, endings=[crash_retry(job, counter="suspicion")])
    [again] = run(ledger)
    assert (again.suspicions, again.alone, again.crashes) == (1, True, 0)
    assert [held.suspicions for held in ledger.held("w1")] == [1]
    record = ledger.job(job.job_id)
    assert record is not None
    assert (record.suspicions, record.alone, record.crash_count) == (1, True, 0)


def test_whoever_was_lost_with_a_whole_worker_is_no_suspect(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    turn(ledger, endings=[crash_retry(job, counter="company")])
    [again] = run(ledger)
    assert (again.suspicions, again.alone, again.crashes) == (1, False, 0)


@pytest.mark.parametrize(("state", "alone"), [(JobState.QUARANTINED, True), (JobState.FAILED, False)], ids=str)
def test_what_was_quarantined_runs_alone_when_it_is_let_go(
    ledger: Ledger, w1: str, state: JobState, alone: bool
) -> None:
    job = running(ledger)
    turn(ledger, endings=[crash_retry(job, counter="suspicion")])
    [again] = run(ledger)
    turn(ledger, endings=[msgspec.structs.replace(crash(again), state=state)])
    assert ledger.retry([job.job_id], "op") == {job.job_id: "queued"}
    [free] = claim(ledger)
    assert (free.alone, free.suspicions, free.crashes) == (alone, 0, 0)


def test_progress_is_kept_and_replaced(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    other = put(ledger)
    ledger.note_progress("w1", [Progress(job.job_id, job.token, 5.0, 1, 10, "one", 4.0)])
    ledger.note_progress("w1", [Progress(job.job_id, job.token, 6.0, 2, 10, "zwei")])
    assert ledger.progress([job.job_id, other]) == {job.job_id: Progress(job.job_id, job.token, 6.0, 2, 10, "zwei")}


def test_only_the_attempt_that_runs_can_note_progress(ledger: Ledger, w1: str, w2: str) -> None:
    job = running(ledger)
    ledger.note_progress("w2", [Progress(job.job_id, job.token, 5.0, 1, 10, "a zombie")])
    ledger.note_progress("w1", [Progress(job.job_id, job.token + 1, 5.0, 1, 10, "another token")])
    assert ledger.progress([job.job_id]) == {}
    turn(ledger, done=[done(job)])
    ledger.note_progress("w1", [Progress(job.job_id, job.token, 5.0, 1, 10, "too late")])
    assert ledger.progress([job.job_id]) == {}


@pytest.mark.parametrize(
    "news",
    [
        {"detector": "oracle"},
        {"autopsy": {"kind": "gamma_ray", "summary": "hit", "detector": "runner"}},
        {"autopsy": {"kind": "signal", "summary": "hit", "detector": "oracle"}, "mood": "grim"},
    ],
)
def test_a_verdict_of_a_newer_version_breaks_neither_the_list_nor_the_round(
    ledger: Ledger, w1: str, w2: str, meddler: Meddler, news: dict[str, object]
) -> None:
    job = running(ledger)
    assert ledger.condemn("w1", verdict(autopsy=DEATH), GuardNone())
    stored = msgspec.json.encode({**msgspec.to_builtins(verdict()), **news}).decode()
    table = "unstuck_workers" if meddler.dialect == "sqlite" else "workers"
    meddler.rows(f"update {table} set verdict = '{stored}' where id = 'w1'")
    dead = next(worker for worker in ledger.workers() if worker.id == "w1")
    assert dead.verdict is not None
    assert "no heartbeat" in dead.verdict.evidence
    assert [one.id for one in ledger.standings(60.0)] == ["w1", "w2"]
    Reaper(ledger, Recovery(), by="test").round(ticket=False)
    assert state_of(ledger, job.job_id) is JobState.FAILED


def test_what_a_dead_worker_said_last_cannot_keep_its_death_from_being_written(ledger: Ledger, w1: str) -> None:
    death = msgspec.structs.replace(DEATH, stderr="a\0b", stack="x\0\udc80")
    Reaper(ledger, Recovery(), by="test").bury("w1", Detector.SUPERVISOR, "its supervisor saw it end", death)
    [worker] = ledger.workers()
    assert worker.verdict is not None
    assert worker.verdict.autopsy is not None
    assert worker.verdict.autopsy.stderr == "a\\x00b"


def test_a_last_death_in_company_is_counted_alike_in_every_ledger(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    turn(ledger, endings=[msgspec.structs.replace(crash(job), counter="suspicion")])
    record = ledger.job(job.job_id)
    assert record is not None
    assert (record.suspicions, record.alone, record.crash_count) == (1, True, 0)


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
        ledger.add_last_words([*found, LastWords(999_999, 1, None, "nobody's")])
    [first], [second] = ledger.attempts(whole.job_id), ledger.attempts(lacking.job_id)
    assert first.autopsy == gone
    assert second.autopsy is not None
    assert (second.autopsy.stdout, second.autopsy.missing) == ("é last line", "")
    assert (second.autopsy.progress, second.autopsy.memory_bytes) == (mark, 4096)
    assert (second.autopsy.kind, second.autopsy.summary) == (gone.kind, gone.summary)
