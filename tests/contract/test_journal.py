"""The journal: what a job wrote down is there for its next attempt, and nobody but the one who runs it can write."""

import json
import threading
from typing import Any

import msgspec
import pytest
from tests.support.builders import claim_jobs, crash_retry, done, put, running, state_of, turn

from unstuck import JobNotFound, SignalRefused
from unstuck.cli.main import main
from unstuck.client.operator import Operator
from unstuck.client.why.story import StepKind
from unstuck.config import Settings
from unstuck.domain.endings import Attempt, Ending, Suspended, conclude
from unstuck.domain.journal import MAX_JOURNAL_BYTES, MAX_SIGNAL_BYTES, MAX_SIGNALS, PendingSignal, unpack_journal
from unstuck.domain.policy import Policy
from unstuck.domain.states import AttemptState, JobState
from unstuck.errors import RefusedValue
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.jobs import JobExtras, JobFilter, NewJob
from unstuck.ledger.contract.workers import Claimed, FollowUp, JournalEntry
from unstuck.remote.journal import JobJournal, Refused, entry_of
from unstuck.remote.messages import StepItem


def entry(job: Claimed, seq: int, value: bytes = b"1", **changes: Any) -> JournalEntry:
    kind = "checkpoint" if seq == 0 else "step"
    return msgspec.structs.replace(JournalEntry(job.job_id, job.token, seq, kind, f"s{seq}", value), **changes)


def suspend(job: Claimed, delay_s: float | None = None, awaits: str | None = None) -> Ending:
    return conclude(Attempt(job.job_id, job.token, Policy(), 0, 0), Suspended(delay_s, awaits))


def lines(job: Claimed) -> list[tuple[int, str, bytes]]:
    return [(line.seq, line.name, line.value) for line in unpack_journal(job.journal).lines]


def again(ledger: Ledger, worker_id: str = "w1") -> Claimed:
    """Claim the one job that is there, running."""
    (job,) = claim_jobs(ledger, worker_id, start=1)
    return job


def test_entries_come_with_the_next_claim_in_their_order(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    assert job.journal == b""
    turn(ledger, entries=[entry(job, 1, b'"a"'), entry(job, 2, b"[2]")])
    turn(ledger, entries=[entry(job, 3)], endings=[crash_retry(job)])
    next_try = again(ledger)
    assert lines(next_try) == [(1, "s1", b'"a"'), (2, "s2", b"[2]"), (3, "s3", b"1")]
    assert all(0 <= line.age_s < 60 for line in unpack_journal(next_try.journal).lines)
    assert [(one.seq, one.token) for one in ledger.jobs.journal(job.job_id)] == [(n, job.token) for n in (1, 2, 3)]


def test_an_entry_is_written_once_and_a_checkpoint_is_written_over(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    turn(ledger, entries=[entry(job, 1, b"1"), entry(job, 0, b"10"), entry(job, 0, b"20")])
    assert not turn(ledger, entries=[entry(job, 1, b"2")]).superseded
    assert [(one.seq, one.value) for one in ledger.jobs.journal(job.job_id)] == [(0, b"20"), (1, b"1")]
    turn(ledger, entries=[entry(job, 0, b"30")])
    assert ledger.jobs.journal(job.job_id)[0].value == b"30"


def test_a_zombie_writes_nothing(ledger: Ledger, w1: str, w2: str) -> None:
    job = running(ledger)
    turn(ledger, endings=[crash_retry(job)])
    assert turn(ledger, entries=[entry(job, 1)]).superseded == {(job.job_id, job.token)}
    theirs = again(ledger, "w2")
    both = turn(ledger, "w2", entries=[entry(job, 1), entry(theirs, 1, b'"theirs"')])
    assert both.superseded == {(job.job_id, job.token)}
    assert turn(ledger, "w1", entries=[entry(theirs, 2)]).superseded == {(job.job_id, theirs.token)}
    assert [one.value for one in ledger.jobs.journal(job.job_id)] == [b'"theirs"']


def test_a_sleeping_job_is_held_by_nobody_and_goes_on_in_time(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    sleep = entry(job, 1, b"0.2", kind="sleep", name="sleep")
    assert not turn(ledger, entries=[sleep], endings=[suspend(job, 0.2)]).superseded
    record = ledger.jobs.get(job.job_id)
    assert record is not None
    assert (record.state, record.worker_id, record.token, record.awaits_signal) == (JobState.WAITING, None, None, None)
    assert (record.failures, record.crash_count, record.attempt) == (0, 0, 1)
    assert claim_jobs(ledger) == []
    assert ledger.workers.held("w1") == []
    assert [one.state for one in ledger.jobs.attempts(job.job_id)] == [AttemptState.SUSPENDED]
    assert [one.id for one in ledger.jobs.list(JobFilter(states=(JobState.WAITING,)))] == [job.job_id]
    (queue,) = ledger.queues.list()
    assert (queue.pending, queue.scheduled, queue.running, queue.waiting) == (0, 0, 0, 1)
    assert ledger.jobs.count()["waiting"] == 1
    while ledger.maintenance.promote_due(10).count == 0:
        pass
    woken = again(ledger)
    assert woken.attempt == 2
    (line,) = unpack_journal(woken.journal).lines
    assert line.age_s >= 0.2, "by the same clock that woke it, the time is over"


def test_a_signal_wakes_the_job_that_waits_for_it(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    turn(ledger, endings=[suspend(job, None, "go")])
    record = ledger.jobs.get(job.job_id)
    assert record is not None
    assert (record.state, record.awaits_signal, record.wakes) == (JobState.WAITING, "go", False)
    assert ledger.queues.list()[0].waiting == 1
    assert ledger.jobs.signal(job.job_id, "other", b"0", "me") == "kept"
    assert state_of(ledger, job.job_id) is JobState.WAITING
    assert ledger.jobs.signal(job.job_id, "go", b'{"a":1}', "me") == "woken"
    woken = again(ledger)
    assert unpack_journal(woken.journal).signals == (
        PendingSignal(1, "other", b"0"),
        PendingSignal(2, "go", b'{"a":1}'),
    )
    assert [event.kind for event in ledger.events.list(job_id=job.job_id)] == ["suspended", "signalled", "signalled"]


def test_a_signal_that_came_while_it_ran_leaves_nothing_to_wait_for(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    assert ledger.jobs.signal(job.job_id, "go", b"1", "me") == "kept"
    turn(ledger, endings=[suspend(job, None, "go")])
    assert state_of(ledger, job.job_id) is JobState.PENDING
    assert unpack_journal(again(ledger).journal).signals == (PendingSignal(1, "go", b"1"),)


def test_signals_are_taken_in_their_order_each_once(ledger: Ledger, w1: str) -> None:
    job_id = put(ledger)
    for number in (1, 2):
        assert ledger.jobs.signal(job_id, "go", str(number).encode(), "me") == "kept"
    job = again(ledger)
    assert [one.number for one in unpack_journal(job.journal).signals] == [1, 2]
    taken = entry(job, 1, b"1", kind="signal", name="go", signal=1)
    turn(ledger, entries=[taken])
    turn(ledger, entries=[taken], endings=[crash_retry(job)])
    job = again(ledger)
    assert [one.number for one in unpack_journal(job.journal).signals] == [2]
    turn(ledger, endings=[suspend(job, None, "go")])
    assert state_of(ledger, job.job_id) is JobState.PENDING
    assert [one.taken_seq for one in ledger.jobs.signals(job_id)] == [1, None]


def test_a_signal_to_a_job_that_is_over_or_was_never_there_is_refused(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    turn(ledger, done=[done(job)])
    assert ledger.jobs.signal(job.job_id, "go", b"1", "me") == "finished"
    assert ledger.jobs.signal(job.job_id + 1000, "go", b"1", "me") == "missing"
    assert ledger.jobs.signals(job.job_id) == []
    with pytest.raises(RefusedValue):
        ledger.jobs.signal(job.job_id, "g\0", b"1", "me")


def test_only_so_many_signals_wait_for_one_job(ledger: Ledger, w1: str) -> None:
    job_id = put(ledger)
    answers = {ledger.jobs.signal(job_id, "go", b"1", "me") for _ in range(MAX_SIGNALS)}
    assert answers == {"kept"}
    assert ledger.jobs.signal(job_id, "go", b"1", "me") == "full"


def test_the_signals_that_wait_for_one_job_have_a_bound_together(ledger: Ledger, w1: str) -> None:
    job_id, other = put(ledger), put(ledger)
    part = b'"%s"' % (b"x" * (MAX_SIGNAL_BYTES // 4 - 2))
    assert [ledger.jobs.signal(job_id, "go", part, "me") for _ in range(5)] == ["kept"] * 4 + ["full"]
    assert ledger.jobs.signal(job_id, "go", b"1", "me") == "full"
    assert ledger.jobs.signal(other, "go", b"1", "me") == "kept"
    # What was taken makes room.
    [job] = claim_jobs(ledger, limit=1, start=1)
    assert job.job_id == job_id
    turn(ledger, entries=[entry(job, 1, part, kind="signal", name="go", signal=1)])
    assert ledger.jobs.signal(job_id, "go", part, "me") == "kept"
    assert ledger.jobs.signal(job_id, "go", b"1", "me") == "full"


def test_signals_that_a_remote_worker_takes_count_for_the_journal_too(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    part = b'"%s"' % (b"x" * (MAX_JOURNAL_BYTES - 2))
    assert ledger.jobs.signal(job.job_id, "go", part, "me") == "kept"
    taken = StepItem(job_id=job.job_id, token=job.token, seq=2, signal=1)
    turn(ledger, entries=[entry(job, 1)])
    with pytest.raises(Refused, match="The steps and signals of one job may hold 16,777,216 bytes"):
        entry_of(JobJournal(ledger, job.job_id), taken, 1_000_000)


def test_no_wake_up_is_lost_however_signal_and_wait_meet(open_again: Any, ledger: Ledger, w1: str) -> None:
    sender = open_again()
    for _ in range(30):
        job = running(ledger)
        # With its journal begun, neither the wait nor the signal writes anything else to the row.
        turn(ledger, entries=[entry(job, 1, b"null", kind="wait", name="go")])
        thread = threading.Thread(target=sender.jobs.signal, args=(job.job_id, "go", b"1", "me"))
        thread.start()
        turn(ledger, endings=[suspend(job, None, "go")])
        thread.join()
        assert state_of(ledger, job.job_id) is JobState.PENDING
        turn(ledger, done=[done(again(ledger))])


def test_a_job_that_waits_can_be_cancelled_and_retried_with_its_journal(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    turn(ledger, entries=[entry(job, 1)], endings=[suspend(job, 100.0, "go")])
    assert ledger.jobs.cancel([job.job_id], "me") == {job.job_id: "cancelled"}
    assert ledger.jobs.signal(job.job_id, "go", b"1", "me") == "finished"
    assert ledger.jobs.retry([job.job_id], "me") == {job.job_id: "queued"}
    assert lines(again(ledger)) == [(1, "s1", b"1")]


def test_a_job_asked_to_stop_does_not_go_to_wait(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    assert ledger.jobs.cancel([job.job_id], "me") == {job.job_id: "requested"}
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
        follow(job, delay_s=100.0, unique_key="k", more=JobExtras(retain_s=3.0)),
        follow(other),
    ]
    answer = turn(ledger, done=[done(job), done(other)], follow=asked)
    assert answer.superseded == {(other.job_id, other.token)}
    second, first = ledger.jobs.list(JobFilter(queue="after"))
    first = ledger.jobs.get(first.id) or first
    assert (first.task, first.payload, first.policy, first.priority) == ("next", b'{"args":["\\u0000"]}', b"\x80", 7)
    assert (first.enqueued_by, first.state) == ("job 1", JobState.PENDING)
    assert second.unique_key == "k"
    assert second.run_at > second.enqueued_at + 90
    (taken,) = claim_jobs(ledger, queues=["after"], tasks=["next"])
    assert (taken.job_id, taken.payload_type) == (first.id, "json")


def test_a_follow_up_that_cannot_be_stored_is_refused_with_all_of_it(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    with pytest.raises(RefusedValue):
        turn(ledger, done=[done(job)], follow=[follow(job, priority=9999)])
    assert state_of(ledger, job.job_id) is JobState.RUNNING


def test_the_journal_goes_when_its_job_goes(ledger: Ledger, w1: str) -> None:
    job = running(ledger)
    ledger.jobs.signal(job.job_id, "go", b"1", "me")
    turn(ledger, entries=[entry(job, 1)])
    turn(ledger, done=[done(job)])
    assert ledger.maintenance.prune(-1.0) == 1
    assert (ledger.jobs.journal(job.job_id), ledger.jobs.signals(job.job_id)) == ([], [])


@pytest.fixture
def waiting(ledger: Ledger, w1: str) -> int:
    """A job that did two steps, died, and waits for a signal."""
    job = running(ledger)
    turn(ledger, entries=[entry(job, 1, b'{"paid":3}', name="charge")], endings=[crash_retry(job)])
    job = again(ledger)
    more = [entry(job, 2, name="pack"), entry(job, 0, b"[7]", name="checkpoint")]
    turn(
        ledger,
        entries=[*more, entry(job, 3, b"60.0", kind="wait", name="go now")],
        endings=[suspend(job, 60.0, "go now")],
    )
    return job.job_id


def test_why_tells_the_steps_and_what_it_waits_for(ledger: Ledger, url: str, waiting: int) -> None:
    operator = Operator(ledger, Settings(url=url))
    ledger.jobs.signal(waiting, "other", b"1", "ada")
    story = operator.why(waiting)
    assert story.headline == "It waits for signal 'go now'."
    told = [step.text for step in story.steps if step.kind is StepKind.STEP]
    assert told == [
        "Step 1, 'charge', is done and will not run again.",
        "Its last checkpoint was written.",
        "Step 2, 'pack', is done and will not run again.",
        "Began to wait for signal 'go now'.",
    ]
    texts = "\n".join(step.text for step in story.steps)
    assert "Try 2 gave its slot back" in texts
    assert "it waits for signal 'go now' for at most 60s." in texts
    assert "Signal 'other' was sent by ada" in texts
    assert "2 steps of it are done (charge, pack)." in story.next
    assert (f"unstuck signal {waiting} 'go now'", "sends what it waits for") in [
        (action.command, action.why) for action in story.actions
    ]


def test_the_doctor_says_how_to_send_it(ledger: Ledger, url: str, waiting: int) -> None:
    finding = Operator(ledger, Settings(url=url)).doctor_job(waiting)[0]
    assert (finding.code, finding.severity) == ("waiting", "info")
    assert finding.what.endswith("waits for signal 'go now'")
    assert "It waits for signal 'go now' since " in finding.why
    assert f"`unstuck signal {waiting} 'go now'` sends it" in finding.cure


def test_a_success_after_a_wait_is_no_success_after_trouble(ledger: Ledger, url: str, w1: str) -> None:
    job = running(ledger)
    turn(ledger, endings=[suspend(job, 0.0)])
    while not ledger.maintenance.promote_due(1).count:
        pass
    turn(ledger, done=[done(again(ledger))])
    story = Operator(ledger, Settings(url=url)).why(job.job_id)
    assert story.headline.startswith("It succeeded, after")


@pytest.mark.usefixtures("restored_logging")
def test_the_commands(ledger: Ledger, url: str, waiting: int, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str, code: int = 0) -> str:
        assert main(["--url", url, *arguments]) == code
        said = capsys.readouterr()
        return said.out if code == 0 else said.err

    assert "waits for signal 'go now'" in run("jobs", "--state", "waiting")
    shown: dict[str, Any] = json.loads(run("job", str(waiting), "--json"))
    assert shown["awaits"] == "go now"
    assert [(one["seq"], one["kind"], one["name"], one["value"]) for one in shown["journal"]] == [
        (0, "checkpoint", "checkpoint", [7]),
        (1, "step", "charge", {"paid": 3}),
        (2, "step", "pack", 1),
        (3, "wait", "go now", 60.0),
    ]
    assert "charge" in run("job", str(waiting))
    assert "sends what it waits for" in run("why", str(waiting))
    assert "VALUE must be JSON" in run("signal", str(waiting), "go now", "{", code=2)
    assert json.loads(run("signal", str(waiting), "go now", '{"ok": true}', "--json"))["answer"] == "woken"
    assert "takes it when it comes to it" in run("signal", str(waiting), "go now")
    assert [msgspec.json.decode(one.value) for one in ledger.jobs.signals(waiting)] == [{"ok": True}, None]
    assert "does not exist" in run("signal", "999999", "x", code=1)
    assert ("signal", f"job {waiting}: go now") in [(one.verb, one.target) for one in ledger.admin.audit(limit=10)]


def test_a_signal_that_nobody_can_take_is_refused_in_words(ledger: Ledger, url: str, w1: str) -> None:
    operator = Operator(ledger, Settings(url=url))
    job = running(ledger)
    turn(ledger, done=[done(job)])
    with pytest.raises(SignalRefused, match="has ended"):
        operator.jobs.signal(job.job_id, "x")
    with pytest.raises(JobNotFound):
        operator.jobs.signal(2**70, "x")


def test_what_is_shown_of_a_journal_and_of_signals_is_bounded_by_bytes_and_the_largest_are_left_out(
    ledger: Ledger, w1: str
) -> None:
    job = running(ledger)
    large, small = b'"' + b"a" * 400_000 + b'"', b'"b"'
    values = [large, small, large, large, small]
    turn(ledger, entries=[entry(job, seq, value) for seq, value in enumerate(values, 1)])
    for value in values:
        ledger.jobs.signal(job.job_id, "go", value, "me")
    for records in (ledger.jobs.journal(job.job_id, 1_000_000), ledger.jobs.signals(job.job_id, 1_000_000)):
        assert [one.value for one in records] == [large, small, large, b"", small]
    assert [one.value for one in ledger.jobs.journal(job.job_id)] == values
    shown = Operator(ledger, Settings()).jobs.detail(job.job_id)
    assert sum(one["value"] == large.decode().strip('"') for one in shown["journal"]) == 2
    assert shown["journal"][3]["value"] == f"(too much to show; app.ledger.journal({job.job_id}) has it)"
    assert shown["signals"][3]["value"] == f"(too much to show; app.ledger.signals({job.job_id}) has it)"
