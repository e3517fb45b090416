"""Runners die, and the death is told; what never began comes back; what they print and leave is bounded."""

import os
import selectors
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.fleet import wait_for
from tests.support.runner_pool import APP, RunnerPoolHarness, frame, gone_within, house, read_pid
from tests.support.signals import send_signal

from unstuck import host
from unstuck.config import Settings
from unstuck.domain.autopsy import DeathKind
from unstuck.domain.endings import Cancelled, Died, Ending, Overran, Raised, Succeeded
from unstuck.domain.policy import Policy
from unstuck.domain.states import AttemptState, JobState
from unstuck.ledger.contract.workers import Claimed
from unstuck.metrics.counters import Counters
from unstuck.worker.fork_client import ForkServerDied, RunnerBorn, RunnerExit
from unstuck.worker.held_jobs import HeldJob
from unstuck.worker.job_metrics import JobMetrics
from unstuck.worker.outbox import Outbox
from unstuck.worker.pacing import Pace
from unstuck.worker.pool import RunnerPool


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[RunnerPoolHarness]:
    with house(tmp_path, max_output_bytes=10_000, pulse_interval_s=0.1) as built:
        yield built


# Runners --------------------------------------------------------------------------------------


def test_a_killed_runner_is_told_with_the_attempt_it_was_in(plain: RunnerPoolHarness, tmp_path: Path) -> None:
    runner = plain.bench.start_runner(0, "sync")
    runner.send([frame(7, "add", 1, 1), frame(8, "wait_for", str(tmp_path / "go")), frame(9, "add", 1, 1)])
    wait_for((tmp_path / "go.entered").exists, "the job is entered")
    pid = plain.born(runner)
    assert plain.trace.entered(0) == 8
    assert plain.trace.occupant(0)[0] == pid
    send_signal(pid, signal.SIGKILL)
    found = plain.exit_of(runner)
    assert (found.slot, found.pid, found.cause) == (0, pid, "killed by SIGKILL (signal 9)")
    assert (found.signal, found.exit_code, found.entered) == (9, None, 8)
    # What it finished before can still be read, and what it never entered is taken back.
    assert [done.token for done in runner.read()] == [7]
    assert runner.closed
    assert runner.take_back() == [9]
    assert plain.trace.occupant(0)[0] == 0


def test_a_runner_that_exits_says_with_which_code(plain: RunnerPoolHarness) -> None:
    runner = plain.bench.start_runner(0, "sync")
    runner.send([frame(1, "die", 3)])
    found = plain.exit_of(runner)
    assert (found.cause, found.exit_code, found.entered) == ("exited with code 3", 3, 1)


def test_a_segfault_leaves_its_stack(plain: RunnerPoolHarness) -> None:
    runner = plain.bench.start_runner(0, "sync")
    runner.send([frame(1, "say", "not this\n"), frame(2, "segfault")])
    found = plain.exit_of(runner)
    assert found.cause == "killed by SIGSEGV (signal 11)"
    assert len(runner.read()) == 1
    assert runner.last_output() == (b"before the fall\n", b"")
    stack = runner.stacks.text()
    assert stack.startswith("Fatal Python error: Segmentation fault")
    assert "in segfault" in stack
    # Neither our own frames nor our own threads are of use to anybody.
    assert "unstuck/runner" not in stack


def test_the_stack_of_code_stuck_in_c_can_be_asked_for(plain: RunnerPoolHarness, tmp_path: Path) -> None:
    runner = plain.bench.start_runner(0, "sync")
    runner.send([frame(1, "hold_the_gil", 600, str(tmp_path / "in"))])
    wait_for((tmp_path / "in").exists, "the job is entered")
    plain.born(runner)
    assert runner.dump_stack()
    wait_for(lambda: "in hold_the_gil" in runner.stacks.text(), "the stack")
    runner.kill()
    assert plain.exit_of(runner).signal == signal.SIGKILL


def test_a_sigterm_to_everybody_is_for_the_worker_to_obey(plain: RunnerPoolHarness, tmp_path: Path) -> None:
    runner, loop = plain.bench.start_runner(0, "sync"), plain.bench.start_runner(1, "async")
    runner.send([frame(1, "wait_for", str(tmp_path / "go"))])
    loop.send([frame(2, "asay", "x", 0.2)])
    wait_for((tmp_path / "go.entered").exists, "the job is entered")
    for pid in (plain.trace.fork_server()[0], plain.born(runner), plain.born(loop)):
        send_signal(pid, signal.SIGTERM)
    (tmp_path / "go").touch()
    assert plain.finish(runner)[0].outcome == Succeeded(b"null")
    assert isinstance(plain.finish(loop)[0].outcome, Succeeded)


def test_what_a_job_forks_or_executes_obeys_a_sigterm(plain: RunnerPoolHarness) -> None:
    runner = plain.bench.start_runner(0, "sync")
    text = """
import multiprocessing
forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
executed = subprocess.Popen(["sleep", "600"])
forked.start()
for process in (forked, executed):
    process.terminate()
forked.join(10), executed.wait(10)
assert (forked.exitcode, executed.returncode) == (-15, -15), (forked.exitcode, executed.returncode)
"""
    assert plain.run(runner, "evaluate", text).outcome == Succeeded(b"null")


def test_user_code_may_handle_sigterm(plain: RunnerPoolHarness, tmp_path: Path) -> None:
    runner = plain.bench.start_runner(0, "sync")
    text = f"signal.signal(signal.SIGTERM, lambda *_: sys.exit('told')); wait_for({str(tmp_path / 'go')!r})"
    runner.send([frame(1, "evaluate", text)])
    wait_for((tmp_path / "go.entered").exists, "the job is entered")
    plain.born(runner)
    runner.terminate()
    outcome = plain.finish(runner)[0].outcome
    assert isinstance(outcome, Raised)
    assert (outcome.type, outcome.message) == ("SystemExit", "told")


def test_a_runner_killed_before_it_is_known_dies_as_well(plain: RunnerPoolHarness) -> None:
    runner = plain.bench.start_runner(0, "sync")
    runner.kill()
    assert plain.exit_of(runner).signal == 9


def test_a_runner_whose_handle_is_closed_ends(plain: RunnerPoolHarness, tmp_path: Path) -> None:
    runner = plain.bench.start_runner(0, "sync")
    runner.send([frame(1, "wait_for", str(tmp_path / "go"))])
    pid = plain.born(runner)
    runner.close()
    assert gone_within(pid)


def test_a_runner_that_writes_rubbish_into_our_stream_is_killed(plain: RunnerPoolHarness) -> None:
    runner = plain.bench.start_runner(0, "sync")
    pid = plain.born(runner)
    text = """
for n in range(3, 60):
    try:
        if os.readlink(f"/proc/self/fd/{n}").startswith("socket"):
            os.write(n, b"rubbish" * 9)
    except OSError:
        pass
"""
    runner.send([frame(1, "evaluate", text)])
    wait_for(lambda: runner.read() == [] and runner.closed, "the stream is given up")
    assert gone_within(pid)


def test_the_manifest_tells_what_the_app_has(plain: RunnerPoolHarness) -> None:
    tasks = {task.name: task for task in plain.manifest.tasks}
    assert not tasks["add"].is_async
    assert tasks["asay"].is_async
    assert tasks["add"].queue == "default"
    assert plain.manifest.fork
    assert plain.manifest.containment.startswith(("cgroup", "subreaper"))


def test_births_are_told(plain: RunnerPoolHarness) -> None:
    runner = plain.bench.start_runner(2, "sync")
    born = plain.wait_event(RunnerBorn)
    assert (born.slot, born.pid) == (2, runner.pid)
    assert runner.pidfd() is not None


# What never began -----------------------------------------------------------------------------


def test_what_was_not_entered_can_be_taken_back_and_is_never_run(plain: RunnerPoolHarness, tmp_path: Path) -> None:
    runner = plain.bench.start_runner(0, "sync")
    blocked = [frame(token, "evaluate", f"open({str(tmp_path / 'ran')!r}, 'w')") for token in range(2, 17)]
    runner.send([frame(1, "wait_for", str(tmp_path / "go")), *blocked])
    wait_for((tmp_path / "go.entered").exists, "the job is entered")
    assert runner.take_back() == list(range(2, 17))
    assert runner.take_back() == []
    runner.send([frame(20, "add", 1, 1)])
    (tmp_path / "go").touch()
    assert [done.token for done in plain.finish(runner, 2)] == [1, 20]
    assert not (tmp_path / "ran").exists()


def test_large_jobs_wait_here_and_can_be_taken_back(plain: RunnerPoolHarness, tmp_path: Path) -> None:
    runner = plain.bench.start_runner(0, "sync")
    runner.send([frame(1, "wait_for", str(tmp_path / "go"))])
    wait_for((tmp_path / "go.entered").exists, "the job is entered")
    runner.send([frame(token, "say", "x" * 500_000) for token in range(2, 22)])
    assert runner.wants_write()
    assert runner.take_back() == list(range(2, 22))
    runner.send([frame(30, "add", 1, 1)])
    (tmp_path / "go").touch()
    assert [done.token for done in plain.finish(runner, 2)] == [1, 30]


def test_more_permits_than_the_socket_takes_are_still_given_in_order(plain: RunnerPoolHarness) -> None:
    runner = plain.bench.start_runner(0, "sync")
    runner.send([frame(token, "add", 1, 1) for token in range(1, 3001)])
    assert [done.token for done in plain.finish(runner, 3000)] == list(range(1, 3001))


def test_a_dead_runner_gives_back_what_was_still_buffered_here(plain: RunnerPoolHarness, tmp_path: Path) -> None:
    runner = plain.bench.start_runner(0, "sync")
    runner.send([frame(1, "wait_for", str(tmp_path / "go"))])
    runner.send([frame(token, "say", "x" * 500_000) for token in range(2, 22)])
    wait_for((tmp_path / "go.entered").exists, "the job is entered")
    plain.born(runner)
    runner.kill()
    assert plain.exit_of(runner).entered == 1
    assert runner.read() == []
    assert runner.take_back() == list(range(2, 22))


def test_async_jobs_that_never_left_come_back(plain: RunnerPoolHarness) -> None:
    loop = plain.bench.start_runner(0, "async")
    assert plain.run(loop, "asay", "up").stdout == b"up\n"
    send_signal(plain.born(loop), signal.SIGSTOP)
    loop.send([frame(token, "asay", "x" * 500_000) for token in range(1, 21)])
    back = loop.take_back()
    assert back == list(range(21 - len(back), 21))
    assert 15 <= len(back) <= 20
    send_signal(plain.born(loop), signal.SIGCONT)
    assert len(plain.finish(loop, 20 - len(back))) == 20 - len(back)


# Floods ---------------------------------------------------------------------------------------


def resident_bytes(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def test_a_flood_of_output_is_bounded_while_it_runs_and_after(plain: RunnerPoolHarness, tmp_path: Path) -> None:
    runner = plain.bench.start_runner(0, "sync")
    runner.send([frame(1, "flood", 100, str(tmp_path / "go"))])
    stdout_fd = runner.stdout.fd
    while not (tmp_path / "go.entered").exists():
        runner.trim_output()
    runner.trim_output()
    assert resident_bytes(stdout_fd) < 2 * 1024 * 1024
    head = runner.peek_output()[0]
    assert head.startswith(b"first words\nxxx")
    assert len(head) < 10_100
    (tmp_path / "go").touch()
    done = plain.finish(runner)[0]
    assert done.stdout.startswith(b"first words\nxxx")
    assert done.stdout.endswith(b"xx\nlast words\n")
    assert b"\0" not in done.stdout
    assert b"bytes left out" in done.stdout
    runner.send([frame(2, "say", "next")])
    assert plain.finish(runner)[0].stdout == b"next"
    assert resident_bytes(stdout_fd) < 2 * 1024 * 1024


# Failpoints -----------------------------------------------------------------------------------


def test_a_failpoint_counts_in_each_runner_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNSTUCK_FAILPOINTS", "runner.before_user_code=kill:2")
    with house(tmp_path) as home:
        for slot in (0, 1):
            runner = home.bench.start_runner(slot, "sync")
            runner.send([frame(1, "add", 1, 1), frame(2, "add", 1, 1)])
            assert home.exit_of(runner).entered == 2
            assert [done.token for done in runner.read()] == [1]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("threading.Thread(target=time.sleep, args=(600,), name='busy', daemon=True).start()", "the thread 'busy'"),
        ("import socket; kept = socket.socket()", "an open socket"),
    ],
)
def test_an_app_that_cannot_be_forked_is_spawned_and_says_why(tmp_path: Path, line: str, why: str) -> None:
    with house(tmp_path, source=f"{APP}\n{line}\n") as home:
        assert not home.manifest.fork
        assert why in home.manifest.why_spawn
        runner = home.bench.start_runner(0, "sync")
        assert home.run(runner, "add", 1, 2).outcome == Succeeded(b"3")
        assert home.run(runner, "say", "words", "errors").stderr == b"errors"
        loop = home.bench.start_runner(1, "async")
        assert home.run(loop, "asay", "words").stdout == b"words\n"
        runner.send([frame(1, "leave_daemon", str(tmp_path / "daemon"), "7")])
        assert home.exit_of(runner).cause == "exited with code 7"
        assert gone_within(read_pid(tmp_path / "daemon"))
        fork_server, _ = home.trace.fork_server()
        send_signal(fork_server, signal.SIGKILL)
        home.wait_event(ForkServerDied)
        assert gone_within(home.born(loop))


def test_a_spawned_runner_that_cannot_import_says_so(tmp_path: Path) -> None:
    source = f"{APP}\nimport socket; kept = socket.socket()\nassert not os.path.exists('broken'), 'broken now'\n"
    with house(tmp_path, source=source) as home:
        (tmp_path / "broken").touch()
        runner = home.bench.start_runner(0, "sync")
        found = home.exit_of(runner)
        assert found.cause == "exited with code 78: it could not import the app"
        assert b"broken now" in runner.last_output()[1]


RETRY = Policy(on_crash="retry")
FAIL = Policy()


class Shift:
    """Runners at work, with the floor's loop in the hands of the test."""

    def __init__(self, built: RunnerPoolHarness, slots: int = 1) -> None:
        self.house = built
        self.selector = selectors.DefaultSelector()
        self.outbox = Outbox()
        self.runners = RunnerPool(
            built.bench,
            built.trace,
            "w-test",
            Settings(),
            slots,
            self.selector,
            self.outbox,
            Pace(),
            JobMetrics(Counters()),
            on_death=lambda job, beside_since_s: (0, 0),
        )
        self.runners.confirm(host.boottime_s())
        self._tokens = iter(range(1, 1000))

    def hold(self, task: str, *args: object, policy: Policy = FAIL, is_async: bool = False) -> HeldJob:
        token = next(self._tokens)
        made = frame(token, task, *args)
        job = Claimed(token, token, task, "default", True, made.payload, "json", b"", 0, 0, 1)
        return HeldJob(job, policy, is_async, 30.0, host.boottime_s())

    def give(self, *holds: HeldJob, depth: int = 0) -> None:
        self.runners.jobs.ready.extend(holds)
        self.runners.feed(depth)

    def step(self, timeout_s: float = 0.02) -> None:
        for key, events in self.selector.select(timeout_s):
            key.data(events)
        self.runners.tick(host.boottime_s())

    def until(self, look: object, what: str) -> None:
        wait_for(lambda: self.step() or look(), what)  # type: ignore[operator,func-returns-value]

    def entered(self, held_job: HeldJob) -> None:
        self.until(lambda: self.house.trace.entered(0) == held_job.token, f"job {held_job.token} to be entered")

    def endings(self, count: int = 1) -> list[Ending]:
        self.until(lambda: len(self.outbox.endings) >= count, f"{count} endings")
        return list(self.outbox.endings)


@contextmanager
def shift(folder: Path, slots: int = 1) -> Iterator[Shift]:
    with house(folder, slots=slots + 1) as built:
        yield Shift(built, slots)


def test_a_job_that_ended_just_before_it_was_cancelled_does_not_take_the_next_one_along(tmp_path: Path) -> None:
    with shift(tmp_path) as at_work:
        first = at_work.hold("add", 1, 2, policy=RETRY)
        go_on = tmp_path / "go-on"
        second = at_work.hold("wait_for", str(go_on), policy=RETRY)
        at_work.runners.jobs.ready.append(first)
        at_work.runners.feed(0)
        slot = at_work.runners.jobs.given[first.token]
        slot.job_started_s = host.boottime_s() + 60  # quick enough to queue behind
        at_work.give(second, depth=1)
        # Its report lies in the stream, unread; the runner is in the next job.
        wait_for(lambda: at_work.house.trace.entered(0) == second.token, "the second to be entered")
        at_work.runners.stop(first.token, Cancelled("by request"), DeathKind.OPERATOR, host.boottime_s())
        assert [done.token for done in at_work.outbox.done] == [first.token]
        go_on.touch()
        at_work.until(lambda: len(at_work.outbox.done) == 2, "the second to succeed")
        assert not at_work.outbox.endings


def test_what_never_began_is_kept_through_drain_deadline_and_lease_and_not_failed(tmp_path: Path) -> None:
    for fate in (Died("drain", counts=False, drained=True), Overran("too long"), Died("lease", counts=False)):
        with shift(tmp_path) as at_work:
            wait_for(lambda at=at_work: at.house.trace.fork_server()[0], "the fork server to be equipped")  # type: ignore[misc]
            fork_server = at_work.house.trace.fork_server()[0]
            send_signal(fork_server, signal.SIGSTOP)
            try:
                held_job = at_work.hold("add", 1, 2)
                at_work.give(held_job)
                at_work.runners.stop(held_job.token, fate, DeathKind.LEASE, host.boottime_s())
            finally:
                send_signal(fork_server, signal.SIGCONT)
            assert list(at_work.runners.jobs.ready) == [held_job]
            assert not at_work.outbox.endings
            at_work.runners.feed(0)
            at_work.until(lambda at=at_work: at.outbox.done, "it to run as if nothing had been")  # type: ignore[misc]


def test_a_frozen_fork_server_is_replaced_and_the_job_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unstuck.worker.pool.BIRTH_S", 0.2)
    with shift(tmp_path) as at_work:
        wait_for(lambda: at_work.house.trace.fork_server()[0], "the fork server to be equipped")
        send_signal(at_work.house.trace.fork_server()[0], signal.SIGSTOP)
        held_job = at_work.hold("add", 1, 2)
        at_work.give(held_job)
        at_work.until(
            lambda: held_job in at_work.runners.jobs.ready, "the job to come back from the frozen fork server"
        )
        monkeypatch.setattr("unstuck.worker.pool.BIRTH_S", 10.0)
        at_work.runners.feed(0)
        at_work.until(lambda: at_work.outbox.done, "the job to run")


def test_a_frozen_fork_server_is_left_alone_while_others_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unstuck.worker.pool.BIRTH_S", 0.2)
    with shift(tmp_path, slots=2) as at_work:
        go_on = tmp_path / "go-on"
        working = at_work.hold("wait_for", str(go_on))
        at_work.give(working)
        at_work.entered(working)
        fork_server = at_work.house.trace.fork_server()[0]
        send_signal(fork_server, signal.SIGSTOP)
        try:
            held_job = at_work.hold("add", 1, 2)
            at_work.give(held_job)
            at_work.until(lambda: held_job in at_work.runners.jobs.ready, "the job to come back")
            go_on.touch()
            at_work.until(lambda: at_work.outbox.done, "the other to end undisturbed")
        finally:
            send_signal(fork_server, signal.SIGCONT)


def test_a_runner_killed_by_a_drain_before_it_began_gives_its_job_back(tmp_path: Path) -> None:
    with shift(tmp_path) as at_work:
        wait_for(lambda: at_work.house.trace.fork_server()[0], "the fork server to be equipped")
        fork_server = at_work.house.trace.fork_server()[0]
        send_signal(fork_server, signal.SIGSTOP)
        try:
            held_job = at_work.hold("add", 1, 2)
            at_work.give(held_job)
            at_work.runners.kill_all(Died("drain", counts=False, drained=True))
        finally:
            send_signal(fork_server, signal.SIGCONT)
        at_work.until(lambda: at_work.runners.jobs.ready or at_work.outbox.done or at_work.outbox.endings, "its end")
        assert not at_work.outbox.endings


def test_no_job_begins_after_its_lease(tmp_path: Path) -> None:
    with shift(tmp_path) as at_work:
        at_work.runners.confirm(host.boottime_s() - 29.0)
        for policy in (RETRY, FAIL):
            held_job = at_work.hold("add", 1, 2, policy=policy)
            at_work.give(held_job)
            assert held_job in at_work.runners.jobs.ready
        at_work.runners.confirm(host.boottime_s())
        at_work.runners.feed(0)
        at_work.until(lambda: at_work.outbox.done, "one of them to run once a beat was confirmed")


def test_a_lease_that_the_fork_server_ended_first_is_no_crash(tmp_path: Path) -> None:
    with shift(tmp_path) as at_work:
        held_job = at_work.hold("wait_for", str(tmp_path / "never"), policy=RETRY)
        at_work.give(held_job)
        at_work.entered(held_job)
        at_work.house.trace.set_lease_end(0, host.boottime_s() - 1)
        # As after a sleep of the machine: the fork server looks before we do.
        wait_for(lambda: at_work.house.bench.read and at_work.house.trace.occupant(0)[0] == 0, "the fork server to act")
        ending = at_work.endings()[0]
        assert ending.state is JobState.PENDING
        assert ending.attempt is AttemptState.CRASHED
        assert ending.counter == "none"


def test_a_birth_heard_of_after_the_death_leaves_nothing_to_watch(tmp_path: Path) -> None:
    with shift(tmp_path) as at_work:
        held_job = at_work.hold("add", 1, 2)
        at_work.give(held_job)
        slot = at_work.runners.jobs.given[held_job.token]
        at_work.runners.reader.saw_gone(slot)  # the end of its stream came first
        wait_for(lambda: at_work.house.bench.read() or slot.runner.pid, "its birth")
        assert slot.runner.pid is not None
        at_work.runners.lifecycle.runner_started(RunnerBorn(0, slot.runner.pid))
        fd = slot.runner.pidfd()
        assert fd is not None
        assert fd not in at_work.selector.get_map(), "a number that the next descriptor may have"


def test_runners_that_die_before_they_begin_are_not_asked_for_without_a_pause(tmp_path: Path) -> None:
    with shift(tmp_path) as at_work:
        held_job = at_work.hold("add", 1, 2)
        at_work.give(held_job)
        for _ in range(3):
            slot = at_work.runners.jobs.given[held_job.token]
            failed = RunnerExit(slot.index, 0, "a runner could not be started: Resource temporarily unavailable")
            at_work.runners.lifecycle.runner_gone(slot, failed)
            assert list(at_work.runners.jobs.ready) == [held_job]
            at_work.runners.feed(0)
            if at_work.runners.jobs.ready:
                break
        assert list(at_work.runners.jobs.ready) == [held_job], "it waits, and another runner may get it"
        wait_for(lambda: host.boottime_s() > at_work.runners.slots.rest_until_s, "the rest to be over")
        at_work.runners.feed(0)
        at_work.until(lambda: at_work.outbox.done, "it to run")


def test_what_an_async_job_raises_when_it_is_stopped_is_not_its_own_failure(tmp_path: Path) -> None:
    text = (
        "import asyncio\nasync def stubborn():\n  try: await asyncio.sleep(60)\n"
        "  except BaseException: raise RuntimeError('while cleaning up')\n"
        "app.task_by_name('asay').definition.__dict__['function'] = stubborn"
    )
    with shift(tmp_path) as at_work:
        teach = at_work.hold("aevaluate", text, is_async=True)
        at_work.give(teach)
        at_work.until(lambda: at_work.outbox.done, "the lesson")
        held_job = at_work.hold("asay", is_async=True, policy=RETRY)
        at_work.give(held_job)
        at_work.step()
        at_work.runners.stop(held_job.token, Died("lease ran out", counts=False), DeathKind.LEASE, host.boottime_s())
        ending = at_work.endings()[0]
        assert (ending.state, ending.counter) == (JobState.PENDING, "none")
