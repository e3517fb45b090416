"""The notebook of an attempt, without a worker: replay, limits, and what leaves with the report."""

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from unstuck.domain import journal
from unstuck.domain.journal import MAX_ENTRIES, Kind, Names, PendingSignal, RecordedEntry, pack_journal
from unstuck.errors import ConfigError, LedgerError, PayloadError, SignalTimeout, StepMismatch, TooManySteps
from unstuck.runner import context, monitor
from unstuck.runner import journal as journal_of_runner
from unstuck.runner.call import raised
from unstuck.runner.context import Context, step
from unstuck.runner.journal import MAX_FOLLOW_UPS, Journal, Journals, Superseded, Suspended
from unstuck.runner.messages import (
    RAISED,
    REFUSED,
    SUCCEEDED,
    SUPERSEDED,
    SUSPENDED,
    WRITTEN,
    JobMessage,
    NewEntry,
    Report,
)
from unstuck.runner.monitor import JobSignals
from unstuck.runner.monitor import JournalChannel as Wire
from unstuck.worker.runner_process import JournalConnection

LIMIT_BYTES = 1_000
MB = 1024 * 1024
TOKEN = 7


class Desk:
    """Stands for the worker: takes down what comes, and answers as it is told."""

    def __init__(self) -> None:
        self.end = JournalConnection()
        self.wrote: list[tuple[int, str, str, bytes]] = []
        self.verdict = WRITTEN
        theirs = socket.socket(fileno=_dup(self.end))
        signs = socket.socketpair()
        self._sockets = (theirs, *signs)
        self.notebooks = Journals(Wire(theirs), LIMIT_BYTES, lambda *_: b"job")
        context.connect(JobSignals(signs[0]), self.notebooks)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def begin(self, lines: Any = (), signals: Any = ()) -> Context:
        frame = JobMessage(TOKEN, 3, "t", "q", b"", "json", 1, 0)
        frame.journal = pack_journal(lines, signals) if lines or signals else b""
        self.notebooks.expect(frame)
        return Context(3, "t", "q", 1, 0, "w", TOKEN)

    def end_with(self, error: BaseException | None = None) -> Report:
        report = Report(TOKEN, SUCCEEDED, b"1") if error is None else raised(TOKEN, error)
        return self.notebooks.close(TOKEN, report, error, raised)

    def close(self) -> None:
        # Both sides see the end of it, and their threads with them.
        self.end.socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self.end.close()
        for one in self._sockets:
            one.close()

    def _serve(self) -> None:
        self.end.socket.setblocking(True)
        while not self.end.closed:
            data = self.end.socket.recv(1 << 20, socket.MSG_PEEK)
            if not data:
                return
            self.end.socket.setblocking(False)
            for request in self.end.read():
                entry = request.entry
                self.wrote.append((entry.seq, entry.kind, entry.name, entry.value))
                self.end.answer(request.number, self.verdict, "why not")
            self.end.socket.setblocking(True)


def _dup(end: JournalConnection) -> int:
    fd = socket.dup(end.their_fd)
    end.handed_over()
    return fd


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk()
    yield made
    made.close()
    context._journals = context._signals = None


def open_journal(journals: Journals) -> Journal:
    journals.expect(JobMessage(TOKEN, 3, "t", "q", b"", "json", 1, 0))
    opened = journals.of(TOKEN)
    assert opened is not None
    return opened


def line(seq: int, name: str, value: bytes = b"1", kind: str = Kind.STEP, age_s: float = 0.0) -> RecordedEntry:
    return RecordedEntry(seq, kind, name, value, age_s)


def never() -> None:
    raise AssertionError("it was done already")


def test_the_second_of_one_name_has_a_number() -> None:
    names = Names()
    assert [names.next(name) for name in ("a", "b", "a", "a")] == ["a", "b", "a#2", "a#3"]


@pytest.mark.parametrize("name", ["", "x" * 201, "a\0", "\ud800", "a#2", 5, None], ids=repr)
def test_names_that_cannot_be_stored_or_told_apart_are_refused(desk: Desk, name: Any) -> None:
    ctx = desk.begin()
    with pytest.raises(ConfigError):
        ctx.step(name, never)


def test_what_is_written_comes_back_and_is_not_called(desk: Desk) -> None:
    ctx = desk.begin([line(1, "a", b"[1,2]"), line(2, "a#2", b"null")])
    assert ctx.step("a", never) == [1, 2]
    assert ctx.step("a", never) is None
    assert ctx.step("b", lambda: (1, {"x": 2})) == [1, {"x": 2}]
    assert desk.wrote == [(3, "step", "b", b'[1,{"x":2}]')]
    assert desk.end_with().extras is None


def test_what_raises_is_not_written_and_its_place_stays_free(desk: Desk) -> None:
    ctx = desk.begin()
    with pytest.raises(ZeroDivisionError):
        ctx.step("a", lambda: 1 // 0)
    ctx.step("b", lambda: 1)
    assert [entry[:3] for entry in desk.wrote] == [(2, "step", "b")]
    again = desk.begin([line(2, "b")])
    desk.notebooks.close(TOKEN, Report(TOKEN, SUCCEEDED), None, raised)
    desk.begin([line(2, "b")])
    assert again.step("a", lambda: 5) == 5


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        (lambda ctx: ctx.step("b", never), "step 'b'"),
        (lambda ctx: ctx.sleep(1), "a sleep"),
        (lambda ctx: ctx.wait_signal("a"), "the signal 'a'"),
    ],
    ids=["renamed", "a sleep instead", "a signal instead"],
)
def test_something_else_at_a_place_is_reported_with_the_cure(desk: Desk, verb: Any, words: str) -> None:
    ctx = desk.begin([line(1, "a")])
    with pytest.raises(StepMismatch, match=f"is step 'a'.*comes to {words}.*unstuck retry 3"):
        verb(ctx)


def test_a_job_that_ends_before_what_was_done_is_reported(desk: Desk) -> None:
    ctx = desk.begin([line(1, "a"), line(2, "b")])
    ctx.step("a", never)
    report = desk.end_with()
    assert report.kind == RAISED
    assert report.words is not None
    assert "ends before it" in report.words[1]


def test_too_many_and_too_large_is_refused_with_the_cure(desk: Desk) -> None:
    ctx = desk.begin([line(seq, "a" if seq == 1 else f"a#{seq}") for seq in range(1, journal.MAX_ENTRIES + 1)])
    for _ in range(journal.MAX_ENTRIES):
        ctx.step("a", never)
    with pytest.raises(TooManySteps, match=r"1,000 .*ctx\.checkpoint"):
        ctx.step("a", never)
    with pytest.raises(PayloadError, match="max_payload_bytes"):
        ctx.checkpoint("x" * LIMIT_BYTES)


def test_a_result_that_is_no_json_is_refused(desk: Desk) -> None:
    ctx = desk.begin()
    with pytest.raises(PayloadError, match="The result of step 'a'"):
        ctx.step("a", lambda: {1, 2})


def test_all_results_together_have_a_limit(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unstuck.runner.journal.MAX_JOURNAL_BYTES", 20)
    ctx = desk.begin([line(1, "a", b'"0123456789"')])
    ctx.step("a", never)
    with pytest.raises(PayloadError, match="20 bytes"):
        ctx.step("b", lambda: "0123456789")


def test_a_sleep_leaves_and_when_it_is_over_returns(desk: Desk) -> None:
    ctx = desk.begin()
    with pytest.raises(Suspended) as caught:
        ctx.sleep("1h")
    with pytest.raises(Suspended):
        ctx.step("a", never)  # whoever swallows it meets it again
    report = desk.end_with(caught.value)
    assert report.kind == SUSPENDED
    assert report.extras is not None
    assert report.extras.pause is not None
    assert (report.extras.pause.delay_s, report.extras.pause.awaits) == (3600.0, None)
    ctx = desk.begin([line(1, "sleep", b"3600.0", Kind.SLEEP, age_s=3600.0)])
    ctx.sleep("1h")
    assert desk.end_with().kind == SUCCEEDED
    ctx = desk.begin([line(1, "sleep", b"3600.0", Kind.SLEEP, age_s=600.0)])
    with pytest.raises(Suspended) as caught:
        ctx.sleep("1h")
    assert caught.value.pause.entry is None
    assert 2999 < (caught.value.pause.delay_s or 0) <= 3000


def test_code_that_swallows_everything_waits_all_the_same(desk: Desk) -> None:
    ctx = desk.begin()
    try:
        ctx.sleep(5)
    except BaseException:
        pass
    assert desk.end_with().kind == SUSPENDED


def test_a_suspension_out_of_a_task_group_is_found(desk: Desk) -> None:
    ctx = desk.begin()

    async def job() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(ctx.sleep_async(5))

    with pytest.raises(BaseExceptionGroup) as caught:
        asyncio.run(job())
    assert desk.end_with(caught.value).kind == SUSPENDED


def test_signals_are_taken_in_their_order(desk: Desk) -> None:
    kept = [PendingSignal(1, "x", b"1"), PendingSignal(2, "go", b"2"), PendingSignal(3, "go", b"3")]
    ctx = desk.begin([line(1, "go", b"0", Kind.SIGNAL), line(2, "go", b"null", Kind.WAIT)], kept)
    assert [ctx.wait_signal("go") for _ in range(3)] == [0, 2, 3]
    assert desk.wrote == [(2, "signal", "go", b"2"), (3, "signal", "go", b"3")]
    with pytest.raises(Suspended) as caught:
        ctx.wait_signal("go", timeout="1m")
    assert (caught.value.pause.delay_s, caught.value.pause.awaits) == (60.0, "go")


def test_a_wait_that_lasted_too_long_is_written_down_and_told(desk: Desk) -> None:
    ctx = desk.begin([line(1, "go", b"60.0", Kind.WAIT, age_s=61.0)])
    with pytest.raises(SignalTimeout, match="within 60s"):
        ctx.wait_signal("go", timeout=60)
    assert desk.wrote == [(1, "timeout", "go", b"60.0")]


def test_an_answer_that_it_is_superseded_ends_the_attempt(desk: Desk) -> None:
    ctx = desk.begin()
    desk.verdict = SUPERSEDED
    with pytest.raises(Superseded):
        ctx.step("a", lambda: 1)
    with pytest.raises(Superseded):
        ctx.checkpoint(1)


def test_an_entry_that_the_ledger_refuses_is_an_error_of_the_job(desk: Desk) -> None:
    ctx = desk.begin()
    desk.verdict = REFUSED
    with pytest.raises(Exception, match="why not"):
        ctx.step("a", lambda: 1)


def test_blocking_verbs_refuse_to_block_an_event_loop(desk: Desk) -> None:
    ctx = desk.begin()

    async def job() -> list[int]:
        for verb in (lambda: ctx.step("a", never), lambda: ctx.sleep(1), lambda: ctx.wait_signal("x")):
            with pytest.raises(RuntimeError, match="_async"):
                verb()
        return list(await asyncio.gather(*(ctx.step_async(f"s{n}", asyncio.sleep, 0, n) for n in range(50))))

    assert asyncio.run(job()) == list(range(50))
    assert sorted(entry[0] for entry in desk.wrote) == list(range(1, 51))


def test_the_last_checkpoint_goes_with_the_report(desk: Desk) -> None:
    ctx = desk.begin([line(0, "checkpoint", b"5", Kind.CHECKPOINT)])
    assert ctx.last_checkpoint == 5
    for number in range(1000):
        ctx.checkpoint(number)
    assert ctx.last_checkpoint == 999
    report = desk.end_with(ValueError("x"))
    assert report.extras is not None
    assert report.extras.checkpoint == b"999"
    assert len(desk.wrote) < 100, "a tight loop does not pay for a packet each"


class Alarm(BaseException):
    pass


# It may also raise where Python can only print it: in the callback of a weak reference.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_that_raises_while_an_entry_is_sent_tears_and_repeats_nothing(desk: Desk) -> None:
    """Between the system call and the note of how much was sent, for example."""

    def alarm(*_: object) -> None:
        raise Alarm

    ctx, value = desk.begin(), "x" * (LIMIT_BYTES - 2)
    before = signal.signal(signal.SIGALRM, alarm)
    done, interruptions = [], []
    try:
        for number in range(MAX_ENTRIES - 1):
            try:
                # At another moment of each step.
                signal.setitimer(signal.ITIMER_REAL, 1e-6 * (1 + number % 200))
                ctx.step(f"step {number}", lambda: value)
                signal.setitimer(signal.ITIMER_REAL, 0)
                done.append(number)
            except BaseException as error:  # Code of Python itself may turn it into another one.
                interruptions.append(error)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interruptions
    assert all(isinstance(one, Alarm) or isinstance(one.__context__, Alarm) for one in interruptions)
    assert ctx.step("last", lambda: 1) == 1
    names = [name for _, _, name, _ in desk.wrote]
    assert names[-1] == "last"
    assert len(names) == len(set(names)), "an entry was sent twice"
    assert {f"step {number}" for number in done} <= set(names)


def test_a_checkpoint_is_not_lost_to_a_signal_that_raises_while_it_is_sent(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx = desk.begin()

    def interrupted(*_: object, **__: object) -> None:
        raise Alarm

    with monkeypatch.context() as patched:
        patched.setattr(Wire, "tell", interrupted)
        with pytest.raises(Alarm):
            ctx.checkpoint(5)
    rest = desk.end_with(Alarm()).extras
    assert rest is not None
    assert rest.checkpoint == b"5"


def test_a_checkpoint_is_with_the_worker_when_the_call_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the process dies in the next moment."""
    monkeypatch.setattr(journal_of_runner, "CHECKPOINT_GAP_S", 0.0)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        journal = open_journal(Journals(Wire(theirs), LIMIT_BYTES, lambda *_: b"job"))
        for number in range(20):
            journal.set_checkpoint(number)
            assert b"checkpoint" in ours.recv(1_000, socket.MSG_DONTWAIT)


def test_a_large_checkpoint_that_is_still_on_its_way_goes_with_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report has a socket of its own, and the worker may read it before the rest of the checkpoint."""
    monkeypatch.setattr(monitor, "MAX_TELL_S", 0.1)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        journals = Journals(Wire(theirs), MB, lambda *_: b"job")
        journal = open_journal(journals)
        journal.set_checkpoint("x" * (MB - 2))
        rest = journals.close(TOKEN, raised(TOKEN, ValueError("x")), ValueError("x"), raised).extras
        assert rest is not None
        assert len(rest.checkpoint) == MB


def test_a_worker_that_reads_nothing_costs_a_job_little_time_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "MAX_TELL_S", 0.1)
    monkeypatch.setattr(journal_of_runner, "CHECKPOINT_GAP_S", 0.0)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        wire = Wire(theirs)
        journals = Journals(wire, MB, lambda *_: b"job")
        journal = open_journal(journals)
        waits = []
        for number in range(200):
            began_s = time.monotonic()
            journal.set_checkpoint(f"{number:03}" + "x" * (MB - 5))
            journals.flush()
            waits.append(time.monotonic() - began_s >= 0.1)
        assert len(wire._unsent) == 1, "the newest checkpoint takes the place of the one before"
        assert sum(waits) < 20, "a job does not wait each time"
        rest = journals.close(TOKEN, raised(TOKEN, ValueError("x")), ValueError("x"), raised).extras
        assert rest is not None
        assert rest.checkpoint[:4] == b'"199'


def test_a_handler_of_a_signal_may_checkpoint_while_the_job_does(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    ctx, tell = desk.begin(), Wire.tell
    monkeypatch.setattr(journal_of_runner, "CHECKPOINT_GAP_S", 60.0)

    def interrupted(self: Wire, token: int, entry: Any) -> Any:
        sent = tell(self, token, entry)
        signal.raise_signal(signal.SIGUSR1)
        return sent

    def handler(*_: object) -> None:
        ctx.checkpoint(2)

    before = signal.signal(signal.SIGUSR1, handler)
    monkeypatch.setattr(Wire, "tell", interrupted)
    try:
        ctx.checkpoint(1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    rest = desk.end_with(ValueError("x")).extras
    assert rest is not None
    assert rest.checkpoint == b"2"


def test_a_job_that_may_start_no_thread_keeps_its_checkpoints(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of processes and threads of a runner may be limited. The thread that beats must not end of it."""

    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    ctx = desk.begin()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        ctx.checkpoint(5)
        desk.notebooks.flush()
        rest = desk.end_with(ValueError("x")).extras
    assert rest is not None
    assert rest.checkpoint == b"5"


def test_a_step_is_refused_and_does_not_hang_if_user_code_closed_the_descriptor(tmp_path: Path) -> None:
    """The number of the descriptor may be that of a file of the user by now."""
    ours, theirs = socket.socketpair()
    with ours, (tmp_path / "file of the user").open("w+b") as users:
        journals = Journals(Wire(theirs), LIMIT_BYTES, lambda *_: b"job")
        journal = open_journal(journals)
        fd = theirs.fileno()
        os.dup2(users.fileno(), fd)
        for number in range(2):
            with pytest.raises(LedgerError, match="closed a descriptor"):
                journal.write(NewEntry(1 + number, Kind.STEP, "next", b"1"))
        began_s = time.monotonic()
        journal.set_checkpoint(5)
        assert time.monotonic() - began_s < monitor.MAX_TELL_S, "nothing is waited for that cannot come"
        assert users.read() == b""
        theirs.close()


def test_what_follows_goes_with_success_alone(desk: Desk) -> None:
    ctx = desk.begin()
    ctx.enqueue("next")
    rest = desk.end_with().extras
    assert rest is not None
    assert rest.follow == (b"job",)
    ctx = desk.begin()
    ctx.enqueue("next")
    assert desk.end_with(ValueError("x")).extras is None
    ctx = desk.begin()
    for _ in range(MAX_FOLLOW_UPS):
        ctx.enqueue("next")
    with pytest.raises(TooManySteps):
        ctx.enqueue("next")


def test_outside_a_worker_steps_are_plain_calls() -> None:
    @step
    def double(number: int) -> int:
        return number * 2

    @step(name="slowly")
    async def double_async(number: int) -> int:
        return number * 2

    ctx = Context(1, "t", "q", 1, 0, "")
    assert (double(2), asyncio.run(double_async(3)), ctx.step("x", double, 4)) == (4, 6, 8)
    assert asyncio.run(ctx.step_async("x", double_async, 5)) == 10
    assert ctx.last_checkpoint is None
    ctx.checkpoint(1)
    ctx.sleep("1h")
    with pytest.raises(LookupError):
        ctx.wait_signal("x")
