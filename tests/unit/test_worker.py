"""The pure parts of the shop floor: what is held ahead, what is handed in, when a lease ends."""

import itertools
import os
import select
import socket
import statistics
import tempfile
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.fleet import wait_for

from unstuck import host
from unstuck.client.batcher import EnqueueBatcher
from unstuck.domain.endings import Ending, Release
from unstuck.domain.events import EventKind
from unstuck.domain.policy import Policy
from unstuck.domain.states import AttemptState, JobState, WorkerState
from unstuck.errors import DuplicateJob, LedgerBusy, LedgerUnavailable, RefusedValue
from unstuck.ledger.contract.jobs import Enqueued, NewJob, Progress
from unstuck.ledger.contract.maintenance import Promoted
from unstuck.ledger.contract.workers import (
    Claimed,
    ClaimRequest,
    FollowUp,
    Heartbeat,
    HeartbeatAnswer,
    JournalEntry,
    Output,
    Success,
    Turn,
    TurnAnswer,
)
from unstuck.ledger.metrics_writer import MetricsWriter
from unstuck.mailbox import Mailbox
from unstuck.metrics.counters import Counters
from unstuck.runner.monitor import JobSignals, read_job_signals
from unstuck.worker.heartbeat import MAX_NEWS, HeartbeatThread
from unstuck.worker.held_jobs import HeldJob
from unstuck.worker.ledger_thread import LedgerThread
from unstuck.worker.limits import OwnPauses, lease_end_s, must_stop_at_s
from unstuck.worker.messages import TurnDone, TurnUncertain
from unstuck.worker.outbox import MAX_ITEMS, Outbox
from unstuck.worker.pacing import MAX_DEPTH, Pace
from unstuck.worker.unrecorded import LOCKED, UNREACHABLE, unrecorded_outcomes


def hold(policy: Policy, lease_s: float | None = 30.0) -> HeldJob:
    return HeldJob(Claimed(1, 2, "t", "q", True, b"", "json", b"", 0, 0, 1), policy, False, lease_s, 0.0)


def test_a_job_that_others_would_take_must_stop_before_its_lease_ends() -> None:
    stop_at_s = must_stop_at_s(hold(Policy(on_crash="retry")), 100.0)
    assert stop_at_s is not None
    assert 100.0 + 30.0 * 0.9 <= stop_at_s < 130.0


def test_a_job_that_nobody_else_would_take_goes_on() -> None:
    assert must_stop_at_s(hold(Policy(on_crash="fail")), 100.0) is None
    assert must_stop_at_s(hold(Policy(on_crash="retry", heartbeat=False), None), 100.0) is None


def test_a_job_past_its_deadline_is_stopped_when_its_worker_may_be_suspect() -> None:
    """A reaper ends it then, and it may be retried: a frozen worker cannot stop it, its fork server does."""
    given = hold(Policy(on_crash="fail", heartbeat=False, timeout_s=60.0), None)
    given.sent_s, given.unheard_s = 100.0, 30.0
    assert must_stop_at_s(given, 100.0) == 160.0, "not before its deadline"
    assert must_stop_at_s(given, 150.0) == 178.0, "and not while its worker is heard"


@pytest.mark.parametrize("timeout_s", [0.5, 2.0, 30.0, 3600.0])
def test_the_margin_leaves_most_of_the_lease(timeout_s: float) -> None:
    assert 0.9 * timeout_s <= lease_end_s(0.0, timeout_s) < timeout_s


def test_nothing_is_held_ahead_of_long_jobs() -> None:
    pace = Pace()
    assert pace.lookahead(8, now_s=0.0) == 0
    for now_s in range(1, 50):
        pace.saw_ends(100, 0.01, now_s * 0.01)
    assert pace.lookahead(8, now_s=0.5) > 0
    # The slots fill with long jobs: nothing ended lately.
    assert pace.lookahead(8, now_s=2.0) == 0


def test_the_depth_follows_the_length_of_jobs() -> None:
    pace = Pace()
    assert pace.depth() == 0
    pace.saw_sync_jobs(10, 0.0005)
    assert 0 < pace.depth() <= MAX_DEPTH
    for _ in range(50):
        pace.saw_sync_jobs(1, 10.0)
    assert pace.depth() == 0


def test_a_turn_takes_a_bounded_batch_and_output_goes_with_its_outcome() -> None:
    outbox = Outbox()
    for n in range(MAX_ITEMS + 5):
        outbox.done.append(Success(n, n, b"null"))
    outbox.put_output(Output(0, 0, b"said", b""))
    outbox.put_output(Output(MAX_ITEMS + 1, MAX_ITEMS + 1, b"later", b""))
    outbox.put_output(Output(3, 3, b"", b""))
    turn = outbox.turn("w", (), None)
    assert len(turn.done) == MAX_ITEMS
    assert [output.token for output in turn.outputs] == [0]
    assert len(outbox) == 5


def test_an_uncertain_turn_gives_back_only_what_was_not_written() -> None:
    outbox = Outbox()
    turn = Turn("w", done=(Success(1, 1, b""), Success(2, 2, b"")), release=(Release(3, 3), Release(4, 4)))
    outbox.put_back(turn, still_held={2, 3})
    assert outbox.tokens() == {2, 3}


def test_outcomes_that_are_left_behind_are_named_each_with_what_kept_it_from_the_ledger() -> None:
    outbox = Outbox()
    outbox.defer(Turn("w", done=(Success(1, 11, b""),)), 0.0, {11: "blocked by session 4711"})
    failed = Ending(2, 12, JobState.FAILED, AttemptState.FAILED)
    outbox.defer(Turn("w", endings=(failed,), release=(Release(3, 13),)), 0.0)
    outbox.done.append(Success(4, 14, b""))
    left = unrecorded_outcomes(outbox, (None, Turn("w", done=(Success(5, 15, b""),))), UNREACHABLE)
    assert {one.job_id: (one.outcome, one.reason) for one in left} == {
        1: (JobState.SUCCEEDED, "blocked by session 4711"),
        2: (JobState.FAILED, LOCKED),
        4: (JobState.SUCCEEDED, UNREACHABLE),
        5: (JobState.SUCCEEDED, UNREACHABLE),
    }
    # On its way once more, it is still known to have waited for a lock.
    outbox.take_up(10.0)
    assert {one.reason for one in unrecorded_outcomes(outbox, (), UNREACHABLE) if one.job_id == 1} == {
        "blocked by session 4711"
    }


def test_an_outcome_that_waits_for_a_lock_is_noted_and_forgotten_when_it_is_written() -> None:
    outbox = Outbox()
    turn = Turn("w", done=(Success(1, 11, b""),), entries=(JournalEntry(2, 12, 1, "step", "s", b"1"),))
    outbox.defer(turn, 100.0)
    assert outbox.take_late(100.5) == []
    assert [one.token for one in outbox.take_late(101.0)] == [11], "an attempt that only wrote a step goes on"
    assert outbox.take_late(110.0) == []
    assert [one.token for one in outbox.take_late(116.0)] == [11], "once more: a failover may have lost the note"
    outbox.written(turn)
    assert outbox.waiting() == []


def test_what_an_attempt_wrote_down_goes_before_its_end() -> None:
    outbox = Outbox()
    for number in range(MAX_ITEMS + 1):
        outbox.put_entry(JournalEntry(number, number, 1, "step", "s", b"1"))
        outbox.done.append(Success(number, number, b"1"))
    outbox.put_entry(JournalEntry(0, 0, 0, "checkpoint", "c", b"old"))
    outbox.put_entry(JournalEntry(0, 0, 0, "checkpoint", "c", b"new"))
    outbox.follow[0] = [FollowUp(0, 0, NewJob("t", "q", b""))]
    first = outbox.turn("w", (), None)
    assert len(first.entries) == MAX_ITEMS
    # Of job 0 the checkpoint is still to be written, of the last its entry: their ends wait.
    assert {item.token for item in first.done} == set(range(1, MAX_ITEMS))
    second = outbox.turn("w", (), None)
    assert [(item.token, item.value) for item in second.entries] == [(MAX_ITEMS, b"1"), (0, b"new")]
    assert sorted(item.token for item in second.done) == [0, MAX_ITEMS]
    assert [item.token for item in second.follow] == [0]
    assert not len(outbox)


def test_entries_of_an_uncertain_turn_come_back_and_a_newer_checkpoint_stands() -> None:
    outbox = Outbox()
    entries = [JournalEntry(1, 1, seq, "step", "s", b"1") for seq in (1, 2)] + [
        JournalEntry(1, 1, 0, "checkpoint", "c", b"old")
    ]
    lost = JournalEntry(2, 2, 1, "step", "s", b"1")
    turn = Turn(
        "w", done=(Success(1, 1, b""),), entries=(*entries, lost), follow=(FollowUp(1, 1, NewJob("t", "q", b"")),)
    )
    outbox.put_entry(JournalEntry(1, 1, 0, "checkpoint", "c", b"new"))
    outbox.put_entry(JournalEntry(1, 1, 3, "step", "s", b"1"))
    outbox.put_back(turn, {1})
    again = outbox.turn("w", (), None)
    assert [(item.seq, item.value) for item in again.entries] == [(1, b"1"), (2, b"1"), (3, b"1"), (0, b"new")]
    assert (again.done, again.follow) == (turn.done, turn.follow)


class _Refusing:
    """A ledger, and its part for workers, that cannot store what is called bad."""

    def __init__(self) -> None:
        self.workers = self
        self.turns: list[Turn] = []

    def turn(self, turn: Turn) -> TurnAnswer:
        values = [*(entry.value for entry in turn.entries), *(item.result for item in turn.done)]
        if b"bad" in values or any(one.job.task == "bad" for one in turn.follow):
            raise RefusedValue("bad")
        if any(one.job.task == "there already" for one in turn.follow):
            raise DuplicateJob(7)
        self.turns.append(turn)
        return TurnAnswer(True)


def test_an_entry_that_cannot_be_stored_is_found_among_others_and_refused_alone() -> None:
    ledger, mailbox = _Refusing(), Mailbox()
    wheel = LedgerThread(ledger, "w", mailbox)  # type: ignore[arg-type]
    turn = Turn(
        "w",
        done=(Success(1, 1, b"ok"), Success(2, 2, b"ok"), Success(3, 3, b"bad"), Success(4, 4, b"ok")),
        entries=tuple(JournalEntry(n, n, 1, "step", "s", b"bad" if n == 2 else b"ok") for n in (1, 2, 3)),
        follow=(FollowUp(1, 1, NewJob("good", "q", b"")), FollowUp(4, 4, NewJob("bad", "q", b""))),
        claim_request=ClaimRequest(("q",), ("t",), 1),
    )
    answer = wheel._turn(turn)
    mailbox.close()
    assert isinstance(answer, TurnDone)
    assert answer.refused == {2: "bad"}
    assert {item.token for part in ledger.turns for item in part.done} == {1, 2}
    assert {item.token for part in ledger.turns for item in part.entries} == {1, 3}
    assert {item.job.task for part in ledger.turns for item in part.follow} == {"good"}
    # What cannot be stored ends alone, and what was to follow it does not.
    assert {item.token for part in ledger.turns for item in part.endings} == {3, 4}
    assert sum(part.claim_request is not None for part in ledger.turns) == 1


def test_a_follow_up_whose_key_is_taken_does_not_stop_the_wheel() -> None:
    ledger, mailbox = _Refusing(), Mailbox()
    wheel = LedgerThread(ledger, "w", mailbox)  # type: ignore[arg-type]
    follow = (FollowUp(2, 2, NewJob("there already", "q", b"")),)
    answer = wheel._turn(Turn("w", done=(Success(1, 1, b"ok"), Success(2, 2, b"ok")), follow=follow))
    mailbox.close()
    assert isinstance(answer, TurnDone)
    assert {item.token for part in ledger.turns for item in part.done} == {1}
    assert {item.token for part in ledger.turns for item in part.endings} == {2}


def test_one_bad_job_does_not_fail_the_enqueues_beside_it() -> None:
    entered = threading.Event()
    go_on = threading.Event()
    batches: list[int] = []

    def write(jobs: list[NewJob]) -> list[Enqueued]:
        batches.append(len(jobs))
        if len(batches) == 1:
            entered.set()
            go_on.wait(10)
        if any(job.task == "bad" for job in jobs):
            raise ValueError("bad")
        return [Enqueued(int(job.task)) for job in jobs]

    coalescer = EnqueueBatcher(write)  # type: ignore[arg-type]
    answers: dict[str, object] = {}

    def enqueue(name: str) -> None:
        try:
            answers[name] = coalescer.enqueue([NewJob(name, "q", b"")])[0].job_id
        except ValueError as error:
            answers[name] = error

    names = ["0", "1", "2", "bad", "3"]
    threads = [threading.Thread(target=enqueue, args=(name,)) for name in names]
    threads[0].start()
    assert entered.wait(10)
    for thread in threads[1:]:
        thread.start()
    while len(coalescer._waiting) < len(names) - 1:
        pass
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert isinstance(answers.pop("bad"), ValueError)
    assert answers == {"0": 0, "1": 1, "2": 2, "3": 3}
    assert max(batches) >= 4, "those who came meanwhile shared a commit"


def test_a_thread_that_outlives_the_floor_writes_into_nobodys_descriptor() -> None:
    mailbox = Mailbox()
    fd = mailbox.wakeup_fd
    mailbox.close()
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), fd)
        mailbox.post("too late")
        assert os.fstat(fd).st_size == 0
    os.close(fd)


def test_a_ledger_that_can_be_read_and_not_written_is_not_asked_without_a_pause() -> None:
    class Standby:
        asked = 0

        @property
        def workers(self) -> "Standby":
            return self

        def turn(self, _turn: Turn) -> None:
            self.asked += 1
            raise LedgerUnavailable("read-only")

    standby, mailbox = Standby(), Mailbox()
    wheel = LedgerThread(standby, "w", mailbox)  # type: ignore[arg-type]
    wheel.start()
    answers: list[TurnUncertain] = []
    deadline_s = time.monotonic() + 0.5
    wheel.turn(Turn("w"))
    while time.monotonic() < deadline_s or len(answers) < 2:
        select.select([mailbox], [], [], max(0.01, deadline_s - time.monotonic()))
        for answer in mailbox.take():
            answers.append(answer)
            wheel.turn(answer.turn)
    wheel.stop(5)
    mailbox.close()
    assert 2 <= len(answers) <= 6, "at once, then ever more slowly"
    assert [answer.again for answer in answers] == [False] + [True] * (len(answers) - 1)


def test_time_in_which_the_worker_stood_still_is_held_against_nobody() -> None:
    pauses = OwnPauses(100.0)
    pauses.look(100.1)
    assert pauses.excuse(99.0) == 99.0
    pauses.look(107.1)
    pauses.look(107.2)
    # Before it, in the middle of it, and after it.
    assert pauses.excuse(99.0) == pytest.approx(106.0)
    assert pauses.excuse(105.0) == pytest.approx(107.1)
    assert pauses.excuse(107.15) == 107.15


def test_signs_that_found_no_room_are_told_by_the_newest() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        signs = JobSignals(theirs)
        for number in range(2_000):
            signs.progress(7, number, None, None)
            signs._sent_s.clear()  # as if there were a moment between any two
        signs.heartbeat(7)
        last_s = host.boottime_s()
        taken = read_job_signals(ours, 2_000)
        assert 0 < len(taken) < 2_000
        signs.flush()
        (newest,) = read_job_signals(ours, 2_000)
        assert newest.done == 1_999
        assert last_s - newest.at_s < last_s - taken[-1].at_s


class Bell:
    def __init__(self) -> None:
        self._rung = threading.Event()

    def wait(self, timeout_s: float) -> frozenset[str]:
        self._rung.wait(timeout_s)
        self._rung.clear()
        return frozenset()

    def interrupt(self) -> None:
        self._rung.set()

    def close(self) -> None:
        self._rung.set()


class Ledger:
    """What the thread calls, with trouble on request: each part is the ledger itself."""

    def __init__(self) -> None:
        self.workers = self.maintenance = self.events = self
        self.beats: list[float] = []
        self.listened = 0
        self.trouble: Exception | None = None
        self.busy_promotions = 0
        self.promoted = 0
        self.next_due_in_s: float | None = None
        self.written: list[tuple[int | None, str]] = []
        self.progress: dict[int, float | None] = {}
        self.writes_trouble: list[Exception] = []

    def write(self, _kind: str, text: str, *, job_id: int | None = None, worker_id: str | None = None) -> int:
        if self.writes_trouble:
            raise self.writes_trouble.pop()
        self.written.append((job_id, text))
        return len(self.written)

    def note_progress(self, _worker_id: str, notes: list[Progress]) -> None:
        if self.writes_trouble:
            raise self.writes_trouble.pop()
        self.progress.update((note.token, note.done) for note in notes)

    def listen(self, _worker_id: str) -> Bell:
        self.listened += 1
        return Bell()

    def beat(self, _pulse: Heartbeat) -> HeartbeatAnswer:
        self.beats.append(time.monotonic())
        if self.trouble is not None:
            raise self.trouble
        return HeartbeatAnswer(WorkerState.ACTIVE, False, None, (), False)

    def promote_due(self, _limit: int) -> Promoted:
        if self.busy_promotions:
            self.busy_promotions -= 1
            raise LedgerBusy("canceling statement due to lock timeout")
        self.promoted += 1
        return Promoted(0, frozenset(), self.next_due_in_s)


@pytest.fixture
def made(request: pytest.FixtureRequest) -> Any:
    ledger, mailbox = Ledger(), Mailbox()
    thread = HeartbeatThread(
        ledger,  # type: ignore[arg-type]
        "w",
        mailbox,
        interval_s=0.1,
        queues=frozenset(),
        report=lambda: Heartbeat("w", 0, 0),
        on_workers=lambda: None,
        metrics_writer=MetricsWriter(ledger, Counters(), 3600.0),  # type: ignore[arg-type]
    )
    thread.start()
    yield SimpleNamespace(ledger=ledger, thread=thread)
    thread.stop(10)
    mailbox.close()


def test_after_an_outage_the_pauses_are_short_beside_the_interval(made: Any) -> None:
    made.ledger.trouble = LedgerUnavailable("away")
    wait_for(lambda: len(made.ledger.beats) >= 8, "several tries")
    pauses = [later - earlier for earlier, later in itertools.pairwise(made.ledger.beats[:8])]
    assert statistics.median(pauses) < 0.1, "each is at most a quarter of the interval"


def test_a_lock_in_the_way_of_a_heartbeat_costs_neither_the_connection_nor_the_wake_ups(
    made: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "unstuck.worker")
    made.ledger.trouble = LedgerBusy("canceling statement due to lock timeout")
    wait_for(lambda: len(made.ledger.beats) >= 5, "several tries")
    assert made.ledger.listened == 1
    said = [one.getMessage() for one in caplog.records if one.name == "unstuck.worker"]
    assert said == ["A lock holds up the heartbeat; trying again"]


def test_a_lock_in_the_way_of_due_jobs_holds_up_no_heartbeat(made: Any) -> None:
    made.ledger.busy_promotions = 3
    made.thread.promote_in(0.0)
    wait_for(lambda: made.ledger.promoted == 1, "the promise to be kept at last")
    assert made.ledger.listened == 1
    assert len(made.ledger.beats) >= 1


@pytest.mark.parametrize("trouble", [LedgerBusy("locked"), LedgerUnavailable("away")])
def test_events_and_progress_that_could_not_be_written_are_written_later(made: Any, trouble: Exception) -> None:
    made.ledger.writes_trouble = [trouble, trouble, trouble]
    made.thread.report_progress([Progress(1, 7, 0.0, 0.5)])
    made.thread.report_events([(EventKind.LOOP_BLOCKED, number, "blocked") for number in range(3)])
    wait_for(lambda: len(made.ledger.written) == 3, "the events to be written")
    assert [job_id for job_id, _ in made.ledger.written] == [0, 1, 2]
    assert made.ledger.progress == {7: 0.5}


def test_what_the_ledger_refuses_for_good_holds_up_nothing_behind_it(
    made: Any, caplog: pytest.LogCaptureFixture
) -> None:
    made.ledger.writes_trouble = [RefusedValue("no such character here"), RefusedValue("no such character here")]
    made.thread.report_progress([Progress(1, 7, 0.0, 0.5, None, "refused")])
    made.thread.report_events([(EventKind.LOOP_BLOCKED, 0, "refused"), (EventKind.LOOP_BLOCKED, 1, "blocked")])
    made.thread.promote_in(0.0)
    wait_for(lambda: made.ledger.promoted, "what comes behind it")
    assert made.ledger.written == [(1, "blocked")]
    assert made.ledger.listened == 1, "it is not taken for an outage"
    assert sum("refused" in one.getMessage() for one in caplog.records) == 2


def test_of_more_events_than_are_kept_the_newest_are_written_and_the_rest_is_logged(
    made: Any, caplog: pytest.LogCaptureFixture
) -> None:
    waiting, go_on = threading.Event(), threading.Event()

    def wait_in_write(*_: object, **__: object) -> None:
        made.ledger.write = write
        waiting.set()
        go_on.wait(60)
        raise LedgerUnavailable("away")

    write, made.ledger.write = made.ledger.write, wait_in_write
    made.thread.report_events([(EventKind.LOOP_BLOCKED, -1, "first")])
    waiting.wait(60)
    for number in range(MAX_NEWS + 10):
        made.thread.report_events([(EventKind.LOOP_BLOCKED, number, "more")])
    go_on.set()
    wait_for(lambda: any("dropped" in one.getMessage() for one in caplog.records), "the loss to be logged")
    assert [job_id for job_id, _ in made.ledger.written] == list(range(10, MAX_NEWS + 10))


def test_due_jobs_that_an_open_transaction_has_locked_are_not_asked_for_without_a_pause(made: Any) -> None:
    made.ledger.next_due_in_s = 0.0
    made.thread.promote_in(0.0)
    wait_for(lambda: len(made.ledger.beats) >= 8, "several heartbeats")
    assert 2 <= made.ledger.promoted <= 20
    # A turn that finds them due as well changes nothing about that.
    for _ in range(100):
        made.thread.promote_in(0.0)
    assert made.ledger.promoted <= 22
    made.ledger.next_due_in_s = None
    asked = made.ledger.promoted
    wait_for(lambda: made.ledger.promoted > asked, "the promise to be kept at last")
