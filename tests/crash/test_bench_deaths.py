"""Runners die, and the death is told; what never began comes back; what they print and leave is bounded."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.crash.bench_kit import House, frame, gone_within, house
from tests.fleet import wait_for

from unstuck.domain.outcomes import Raised, Succeeded
from unstuck.worker.bench import RunnerBorn


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[House]:
    with house(tmp_path, max_output_bytes=10_000, pulse_interval_s=0.1) as built:
        yield built


# Runners --------------------------------------------------------------------------------------


def test_a_killed_runner_is_told_with_the_attempt_it_was_in(plain: House, tmp_path: Path) -> None:
    runner = plain.bench.open_runner(0, "sync")
    runner.send([frame(7, "add", 1, 1), frame(8, "wait_for", str(tmp_path / "go")), frame(9, "add", 1, 1)])
    wait_for((tmp_path / "go.entered").exists, "the job is entered")
    pid = plain.born(runner)
    assert plain.trace.entered(0) == 8
    assert plain.trace.occupant(0)[0] == pid
    os.kill(pid, signal.SIGKILL)
    found = plain.exit_of(runner)
    assert (found.slot, found.pid, found.cause) == (0, pid, "killed by SIGKILL (signal 9)")
    assert (found.signal, found.exit_code, found.entered) == (9, None, 8)
    # What it finished before can still be read, and what it never entered is taken back.
    assert [done.token for done in runner.read()] == [7]
    assert runner.closed
    assert runner.retract() == [9]
    assert plain.trace.occupant(0)[0] == 0


def test_a_runner_that_exits_says_with_which_code(plain: House) -> None:
    runner = plain.bench.open_runner(0, "sync")
    runner.send([frame(1, "die", 3)])
    found = plain.exit_of(runner)
    assert (found.cause, found.exit_code, found.entered) == ("exited with code 3", 3, 1)


def test_a_segfault_leaves_its_stack(plain: House) -> None:
    runner = plain.bench.open_runner(0, "sync")
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


def test_the_stack_of_code_stuck_in_c_can_be_asked_for(plain: House, tmp_path: Path) -> None:
    runner = plain.bench.open_runner(0, "sync")
    runner.send([frame(1, "hold_the_gil", 600, str(tmp_path / "in"))])
    wait_for((tmp_path / "in").exists, "the job is entered")
    plain.born(runner)
    assert runner.dump_stack()
    wait_for(lambda: "in hold_the_gil" in runner.stacks.text(), "the stack")
    runner.kill()
    assert plain.exit_of(runner).signal == signal.SIGKILL


def test_a_sigterm_to_everybody_is_for_the_worker_to_obey(plain: House, tmp_path: Path) -> None:
    runner, loop = plain.bench.open_runner(0, "sync"), plain.bench.open_runner(1, "async")
    runner.send([frame(1, "wait_for", str(tmp_path / "go"))])
    loop.send([frame(2, "asay", "x", 0.2)])
    wait_for((tmp_path / "go.entered").exists, "the job is entered")
    for pid in (plain.trace.nursery()[0], plain.born(runner), plain.born(loop)):
        os.kill(pid, signal.SIGTERM)
    (tmp_path / "go").touch()
    assert plain.finish(runner)[0].outcome == Succeeded(b"null")
    assert isinstance(plain.finish(loop)[0].outcome, Succeeded)


def test_what_a_job_forks_or_executes_obeys_a_sigterm(plain: House) -> None:
    runner = plain.bench.open_runner(0, "sync")
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


def test_user_code_may_handle_sigterm(plain: House, tmp_path: Path) -> None:
    runner = plain.bench.open_runner(0, "sync")
    text = f"signal.signal(signal.SIGTERM, lambda *_: sys.exit('told')); wait_for({str(tmp_path / 'go')!r})"
    runner.send([frame(1, "evaluate", text)])
    wait_for((tmp_path / "go.entered").exists, "the job is entered")
    plain.born(runner)
    runner.terminate()
    outcome = plain.finish(runner)[0].outcome
    assert isinstance(outcome, Raised)
    assert (outcome.type, outcome.message) == ("SystemExit", "told")


def test_a_runner_killed_before_it_is_known_dies_as_well(plain: House) -> None:
    runner = plain.bench.open_runner(0, "sync")
    runner.kill()
    assert plain.exit_of(runner).signal == 9


def test_a_runner_whose_handle_is_closed_ends(plain: House, tmp_path: Path) -> None:
    runner = plain.bench.open_runner(0, "sync")
    runner.send([frame(1, "wait_for", str(tmp_path / "go"))])
    pid = plain.born(runner)
    runner.close()
    assert gone_within(pid, 2)


def test_a_runner_that_writes_rubbish_into_our_stream_is_killed(plain: House) -> None:
    runner = plain.bench.open_runner(0, "sync")
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
    assert gone_within(pid, 2)


def test_the_manifest_tells_what_the_app_has(plain: House) -> None:
    tasks = {task.name: task for task in plain.manifest.tasks}
    assert not tasks["add"].is_async
    assert tasks["asay"].is_async
    assert tasks["add"].queue == "default"
    assert plain.manifest.fork
    assert plain.manifest.containment.startswith(("cgroup", "subreaper"))


def test_births_are_told(plain: House) -> None:
    runner = plain.bench.open_runner(2, "sync")
    born = plain.wait_event(RunnerBorn)
    assert (born.slot, born.pid) == (2, runner.pid)
    assert runner.pidfd() is not None


# What never began -----------------------------------------------------------------------------


def test_what_was_not_entered_can_be_taken_back_and_is_never_run(plain: House, tmp_path: Path) -> None:
    runner = plain.bench.open_runner(0, "sync")
    blocked = [frame(token, "evaluate", f"open({str(tmp_path / 'ran')!r}, 'w')") for token in range(2, 17)]
    runner.send([frame(1, "wait_for", str(tmp_path / "go")), *blocked])
    wait_for((tmp_path / "go.entered").exists, "the job is entered")
    assert runner.retract() == list(range(2, 17))
    assert runner.retract() == []
    runner.send([frame(20, "add", 1, 1)])
    (tmp_path / "go").touch()
    assert [done.token for done in plain.finish(runner, 2)] == [1, 20]
    assert not (tmp_path / "ran").exists()


def test_large_jobs_wait_here_and_can_be_taken_back(plain: House, tmp_path: Path) -> None:
    runner = plain.bench.open_runner(0, "sync")
    runner.send([frame(1, "wait_for", str(tmp_path / "go"))])
    wait_for((tmp_path / "go.entered").exists, "the job is entered")
    runner.send([frame(token, "say", "x" * 500_000) for token in range(2, 22)])
    assert runner.wants_write()
    assert runner.retract() == list(range(2, 22))
    runner.send([frame(30, "add", 1, 1)])
    (tmp_path / "go").touch()
    assert [done.token for done in plain.finish(runner, 2)] == [1, 30]


def test_more_permits_than_the_socket_takes_are_still_given_in_order(plain: House) -> None:
    runner = plain.bench.open_runner(0, "sync")
    runner.send([frame(token, "add", 1, 1) for token in range(1, 3001)])
    assert [done.token for done in plain.finish(runner, 3000)] == list(range(1, 3001))


def test_a_dead_runner_gives_back_what_was_still_buffered_here(plain: House, tmp_path: Path) -> None:
    runner = plain.bench.open_runner(0, "sync")
    runner.send([frame(1, "wait_for", str(tmp_path / "go"))])
    runner.send([frame(token, "say", "x" * 500_000) for token in range(2, 22)])
    wait_for((tmp_path / "go.entered").exists, "the job is entered")
    plain.born(runner)
    runner.kill()
    assert plain.exit_of(runner).entered == 1
    assert runner.read() == []
    assert runner.retract() == list(range(2, 22))


def test_async_jobs_that_never_left_come_back(plain: House) -> None:
    loop = plain.bench.open_runner(0, "async")
    assert plain.run(loop, "asay", "up").stdout == b"up\n"
    os.kill(plain.born(loop), signal.SIGSTOP)
    loop.send([frame(token, "asay", "x" * 500_000) for token in range(1, 21)])
    back = loop.retract()
    assert back == list(range(21 - len(back), 21))
    assert 15 <= len(back) <= 20
    os.kill(plain.born(loop), signal.SIGCONT)
    assert len(plain.finish(loop, 20 - len(back))) == 20 - len(back)


# Floods ---------------------------------------------------------------------------------------


def resident_bytes(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def test_a_flood_of_output_is_bounded_while_it_runs_and_after(plain: House, tmp_path: Path) -> None:
    runner = plain.bench.open_runner(0, "sync")
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
            runner = home.bench.open_runner(slot, "sync")
            runner.send([frame(1, "add", 1, 1), frame(2, "add", 1, 1)])
            assert home.exit_of(runner).entered == 2
            assert [done.token for done in runner.read()] == [1]
