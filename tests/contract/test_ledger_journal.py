"""The journal: what a job wrote down is there for its next attempt, and nobody but the one who runs it can write."""

import threading
from typing import Any

import msgspec
import pytest
from tests.contract.hands import claim, crash_retry, done, put, running, state_of, turn

from unstuck.domain.endings import Ending
from unstuck.domain.errors import RefusedValue
from unstuck.domain.journal import MAX_SIGNALS, Kept, unpack
from unstuck.domain.outcomes import Suspended
from unstuck.domain.policy import Policy
from unstuck.domain.recovery import Attempt, conclude
from unstuck.domain.states import AttemptState, JobState
from unstuck.store.contract import Ledger
from unstuck.store.records import Claimed, Entry, FollowUp, JobFilter, NewJob, Ties


def entry(job: Claimed, seq: int, value: bytes = b"1", **changes: Any) -> Entry:
    kind = "checkpoint" if seq == 0 else "step"
    return msgspec.structs.replace(Entry(job.job_id, job.token, seq, kind, f"s{seq}", value), **changes)


def suspend(job: Claimed, delay_s: float | None = None, awaits: str | None = None) -> Ending:
    return conclude(Attempt(job.job_id, job.token, Policy(), 0, 0), Suspended(delay_s, awaits))


def lines(job: Claimed) -> list[tuple[int, str, bytes]]:
    return [(line.seq, line.name, line.value) for line in unpack(job.journal).lines]


def again(ledger: Ledger, worker_id: str = "w1") -> Claimed:
    """Claim the one job that is there, running."""
    (job,) = claim(ledger, worker_id, start=1)
    return job


def test_entries_come_with_the_next_claim_in_their_order(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    assert job.journal == b""
    turn(ledger, entries=[entry(job, 1, b'"a"'), entry(job, 2, b"[2]")])
    turn(ledger, entries=[entry(job, 3)], endings=[crash_retry(job)])
    next_try = again(ledger)
    assert lines(next_try) == [(1, "s1", b'"a"'), (2, "s2", b"[2]"), (3, "s3", b"1")]
    assert all(0 <= line.age_s < 60 for line in unpack(next_try.journal).lines)
    assert [(one.seq, one.token) for one in ledger.journal(job.job_id)] == [(n, job.token) for n in (1, 2, 3)]


def test_an_entry_is_written_once_and_a_checkpoint_is_written_over(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    turn(ledger, entries=[entry(job, 1, b"1"), entry(job, 0, b"10"), entry(job, 0, b"20")])
    assert not turn(ledger, entries=[entry(job, 1, b"2")]).superseded
    assert [(one.seq, one.value) for one in ledger.journal(job.job_id)] == [(0, b"20"), (1, b"1")]
    turn(ledger, entries=[entry(job, 0, b"30")])
    assert ledger.journal(job.job_id)[0].value == b"30"


def test_a_zombie_writes_nothing(ledger: Ledger, w1: str, w2: str) -> None:
    job = running(ledger)
    turn(ledger, endings=[crash_retry(job)])
    assert turn(ledger, entries=[entry(job, 1)]).superseded == {(job.job_id, job.token)}
    theirs = again(ledger, "w2")
    both = turn(ledger, "w2", entries=[entry(job, 1), entry(theirs, 1, b'"theirs"')])
    assert both.superseded == {(job.job_id, job.token)}
    assert turn(ledger, "w1", entries=[entry(theirs, 2)]).superseded == {(job.job_id, theirs.token)}
    assert [one.value for one in ledger.journal(job.job_id)] == [b'"theirs"']


def test_a_sleeping_job_is_held_by_nobody_and_goes_on_in_time(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    sleep = entry(job, 1, b"0.2", kind="sleep", name="sleep")
    assert not turn(ledger, entries=[sleep], endings=[suspend(job, 0.2)]).superseded
    record = ledger.job(job.job_id)
    assert record is not None
    assert (record.state, record.worker_id, record.token, record.awaits) == (JobState.WAITING, None, None, None)
    assert (record.failures, record.crash_count, record.attempt) == (0, 0, 1)
    assert claim(ledger) == []
    assert ledger.held("w1") == []
    assert [one.state for one in ledger.attempts(job.job_id)] == [AttemptState.SUSPENDED]
    assert [one.id for one in ledger.jobs(JobFilter(states=(JobState.WAITING,)))] == [job.job_id]
    (queue,) = ledger.queues()
    assert (queue.pending, queue.scheduled, queue.running, queue.waiting) == (0, 0, 0, 1)
    assert ledger.count_jobs()["waiting"] == 1
    while ledger.promote_due(10).count == 0:
        pass
    woken = again(ledger)
    assert woken.attempt == 2
    (line,) = unpack(woken.journal).lines
    assert line.age_s >= 0.2, "by the same clock that woke it, the time is over"


def test_a_signal_wakes_the_job_that_waits_for_it(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    turn(ledger, endings=[suspend(job, None, "go")])
    record = ledger.job(job.job_id)
    assert record is not None
    assert (record.state, record.awaits, record.wakes) == (JobState.WAITING, "go", False)
    assert ledger.queues()[0].waiting == 1
    assert ledger.signal(job.job_id, "other", b"0", "me") == "kept"
    assert state_of(ledger, job.job_id) is JobState.WAITING
    assert ledger.signal(job.job_id, "go", b'{"a":1}', "me") == "woken"
    woken = again(ledger)
    assert unpack(woken.journal).signals == (Kept(1, "other", b"0"), Kept(2, "go", b'{"a":1}'))
    assert [event.kind for event in ledger.events(job_id=job.job_id)] == ["suspended", "signalled", "signalled"]


def test_a_signal_that_came_while_it_ran_leaves_nothing_to_wait_for(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    assert ledger.signal(job.job_id, "go", b"1", "me") == "kept"
    turn(ledger, endings=[suspend(job, None, "go")])
    assert state_of(ledger, job.job_id) is JobState.PENDING
    assert unpack(again(ledger).journal).signals == (Kept(1, "go", b"1"),)


def test_signals_are_taken_in_their_order_each_once(ledger: Ledger, w1: str) -> None:
    job_id = put(ledger)
    for number in (1, 2):
        assert ledger.signal(job_id, "go", str(number).encode(), "me") == "kept"
    job = again(ledger)
    assert [one.number for one in unpack(job.journal).signals] == [1, 2]
    taken = entry(job, 1, b"1", kind="signal", name="go", signal=1)
    turn(ledger, entries=[taken])
    turn(ledger, entries=[taken], endings=[crash_retry(job)])
    job = again(ledger)
    assert [one.number for one in unpack(job.journal).signals] == [2]
    turn(ledger, endings=[suspend(job, None, "go")])
    assert state_of(ledger, job.job_id) is JobState.PENDING
    assert [one.taken_seq for one in ledger.signals(job_id)] == [1, None]


def test_a_signal_to_a_job_that_is_over_or_was_never_there_is_refused(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    turn(ledger, done=[done(job)])
    assert ledger.signal(job.job_id, "go", b"1", "me") == "finished"
    assert ledger.signal(job.job_id + 1000, "go", b"1", "me") == "missing"
    assert ledger.signals(job.job_id) == []
    with pytest.raises(RefusedValue):
        ledger.signal(job.job_id, "g\0", b"1", "me")


def test_only_so_many_signals_wait_for_one_job(ledger: Ledger, w1: str) -> None:
    job_id = put(ledger)
    answers = {ledger.signal(job_id, "go", b"1", "me") for _ in range(MAX_SIGNALS)}
    assert answers == {"kept"}
    assert ledger.signal(job_id, "go", b"1", "me") == "full"


def test_no_wake_up_is_lost_however_signal_and_wait_meet(open_again: Any, ledger: Ledger, w1: str) -> None:
    sender = open_again()
    for _ in range(30):
        job = running(ledger)
        # With its journal begun, neither the wait nor the signal writes anything else to the row.
        turn(ledger, entries=[entry(job, 1, b"null", kind="wait", name="go")])
        thread = threading.Thread(target=sender.signal, args=(job.job_id, "go", b"1", "me"))
        thread.start()
        turn(ledger, endings=[suspend(job, None, "go")])
        thread.join()
        assert state_of(ledger, job.job_id) is JobState.PENDING
        turn(ledger, done=[done(again(ledger))])


def test_a_job_that_waits_can_be_cancelled_and_retried_with_its_journal(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    turn(ledger, entries=[entry(job, 1)], endings=[suspend(job, 100.0, "go")])
    assert ledger.cancel([job.job_id], "me") == {job.job_id: "cancelled"}
    assert ledger.signal(job.job_id, "go", b"1", "me") == "finished"
    assert ledger.retry([job.job_id], "me") == {job.job_id: "queued"}
    assert lines(again(ledger)) == [(1, "s1", b"1")]


def test_a_job_asked_to_stop_does_not_go_to_wait(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    assert ledger.cancel([job.job_id], "me") == {job.job_id: "requested"}
    turn(ledger, endings=[suspend(job, 100.0)])
    assert state_of(ledger, job.job_id) is JobState.CANCELLED


def follow(job: Claimed, **changes: Any) -> FollowUp:
    facts: dict[str, Any] = {"task": "next", "queue": "after", "payload": b'{"args":["\\u0000"]}'}
    return FollowUp(job.job_id, job.token, NewJob(**{**facts, **changes}))


def test_what_follows_is_enqueued_with_the_end_and_only_then(ledger: Ledger, w1: str) -> None:
    job, other = running(ledger), running(ledger)
    turn(ledger, endings=[crash_retry(other)])
    asked = [
        follow(job, priority=7, policy=b"\x80", on_crash="retry", timeout_s=5.0, enqueued_by="job 1", heartbeat=False),
        follow(job, delay_s=100.0, unique_key="k", more=Ties(keep_s=3.0)),
        follow(other),
    ]
    answer = turn(ledger, done=[done(job), done(other)], follow=asked)
    assert answer.superseded == {(other.job_id, other.token)}
    second, first = ledger.jobs(JobFilter(queue="after"))
    first = ledger.job(first.id) or first
    assert (first.task, first.payload, first.policy, first.priority) == ("next", b'{"args":["\\u0000"]}', b"\x80", 7)
    assert (first.enqueued_by, first.state) == ("job 1", JobState.PENDING)
    assert second.unique_key == "k"
    assert second.run_at > second.enqueued_at + 90
    (taken,) = claim(ledger, queues=["after"], tasks=["next"])
    assert (taken.job_id, taken.payload_type) == (first.id, "json")


def test_a_follow_up_that_cannot_be_stored_is_refused_with_all_of_it(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    with pytest.raises(RefusedValue):
        turn(ledger, done=[done(job)], follow=[follow(job, priority=9999)])
    assert state_of(ledger, job.job_id) is JobState.RUNNING


def test_the_journal_goes_when_its_job_goes(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    ledger.signal(job.job_id, "go", b"1", "me")
    turn(ledger, entries=[entry(job, 1)])
    turn(ledger, done=[done(job)])
    assert ledger.prune(-1.0) == 1
    assert (ledger.journal(job.job_id), ledger.signals(job.job_id)) == ([], [])
