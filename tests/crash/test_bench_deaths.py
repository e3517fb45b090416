"""Whoever dies below a worker, the death is told, what never began comes back, and nothing stays behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.crash.bench_kit import APP, House, frame, gone_within, house, read_pid, wait_until

from unstuck import host
from unstuck.domain.outcomes import Raised, Succeeded
from unstuck.reaper import scene
from unstuck.runner.containment import detect
from unstuck.runner.trace import Trace
from unstuck.worker.bench import NurseryGone, RunnerBorn, RunnerExit


@pytest.fixture(params=["cgroup", "subreaper"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[House]:
    with house(tmp_path, cgroup=request.param == "cgroup", max_output_bytes=10_000, pulse_interval_s=0.1) as built:
        yield built


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[House]:
    with house(tmp_path, max_output_bytes=10_000, pulse_interval_s=0.1) as built:
        yield built


# Runners --------------------------------------------------------------------------------------


def test_a_killed_runner_is_told_with_the_attempt_it_was_in(plain: House, tmp_path: Path) -> None:
    runner = plain.bench.open_runner(0, "sync")
    runner.send([frame(7, "add", 1, 1), frame(8, "wait_for", str(tmp_path / "go")), frame(9, "add", 1, 1)])
    wait_until((tmp_path / "go.entered").exists, "the job is entered")
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
    stack = runner.stack()
    assert stack.startswith("Fatal Python error: Segmentation fault")
    assert "in segfault" in stack
    # Neither our own frames nor our own threads are of use to anybody.
    assert "unstuck/runner" not in stack


def test_the_stack_of_code_stuck_in_c_can_be_asked_for(plain: House, tmp_path: Path) -> None:
    runner = plain.bench.open_runner(0, "sync")
    runner.send([frame(1, "hold_the_gil", 600, str(tmp_path / "in"))])
    wait_until((tmp_path / "in").exists, "the job is entered")
    plain.born(runner)
    assert runner.dump_stack()
    wait_until(lambda: "in hold_the_gil" in runner.stack(), "the stack")
    runner.kill()
    assert plain.exit_of(runner).signal == signal.SIGKILL


def test_a_sigterm_to_everybody_is_for_the_worker_to_obey(plain: House, tmp_path: Path) -> None:
    runner, loop = plain.bench.open_runner(0, "sync"), plain.bench.open_runner(1, "async")
    runner.send([frame(1, "wait_for", str(tmp_path / "go"))])
    loop.send([frame(2, "asay", "x", 0.2)])
    wait_until((tmp_path / "go.entered").exists, "the job is entered")
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
    wait_until((tmp_path / "go.entered").exists, "the job is entered")
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
    wait_until(lambda: runner.read() == [] and runner.closed, "the stream is given up")
    assert gone_within(pid, 2)


# What never began -----------------------------------------------------------------------------


def test_what_was_not_entered_can_be_taken_back_and_is_never_run(plain: House, tmp_path: Path) -> None:
    runner = plain.bench.open_runner(0, "sync")
    blocked = [frame(token, "evaluate", f"open({str(tmp_path / 'ran')!r}, 'w')") for token in range(2, 17)]
    runner.send([frame(1, "wait_for", str(tmp_path / "go")), *blocked])
    wait_until((tmp_path / "go.entered").exists, "the job is entered")
    assert runner.retract() == list(range(2, 17))
    assert runner.retract() == []
    runner.send([frame(20, "add", 1, 1)])
    (tmp_path / "go").touch()
    assert [done.token for done in plain.finish(runner, 2)] == [1, 20]
    assert not (tmp_path / "ran").exists()


def test_large_jobs_wait_here_and_can_be_taken_back(plain: House, tmp_path: Path) -> None:
    runner = plain.bench.open_runner(0, "sync")
    runner.send([frame(1, "wait_for", str(tmp_path / "go"))])
    wait_until((tmp_path / "go.entered").exists, "the job is entered")
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
    wait_until((tmp_path / "go.entered").exists, "the job is entered")
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


# Grandchildren --------------------------------------------------------------------------------


def test_children_that_a_job_leaves_die_with_it(home: House, tmp_path: Path) -> None:
    runner = home.bench.open_runner(0, "sync")
    done = home.run(runner, "leave_child", ["sleep", "600"])
    assert isinstance(done.outcome, Succeeded)
    assert gone_within(int(done.outcome.result), 0.5)


def test_a_daemon_that_a_job_leaves_dies_with_it(home: House, tmp_path: Path) -> None:
    runner = home.bench.open_runner(0, "sync")
    done = home.run(runner, "leave_daemon", str(tmp_path / "daemon"))
    assert done.outcome == Succeeded(b"null")
    assert gone_within(read_pid(tmp_path / "daemon"), 0.5)
    assert home.run(runner, "add", 1, 1).outcome == Succeeded(b"2")


@pytest.mark.parametrize("then", ["wait", "3"])
def test_a_daemon_dies_with_a_runner_that_dies(home: House, tmp_path: Path, then: str) -> None:
    runner = home.bench.open_runner(0, "sync")
    runner.send([frame(1, "leave_daemon", str(tmp_path / "daemon"), then)])
    daemon = read_pid(tmp_path / "daemon")
    if then == "wait":
        home.born(runner)
        runner.kill()
    home.exit_of(runner)
    assert gone_within(daemon, 1)


def test_a_crowd_of_daemons_dies_to_the_last(home: House, tmp_path: Path) -> None:
    runner = home.bench.open_runner(0, "sync")
    text = f"for n in range(20): daemon({str(tmp_path)!r} + f'/d{{n}}')"
    assert home.run(runner, "evaluate", text).outcome == Succeeded(b"null")
    assert all(gone_within(read_pid(tmp_path / f"d{n}"), 1) for n in range(20))


def test_a_new_nursery_leaves_the_rooms_of_the_living_alone(plain: House, tmp_path: Path) -> None:
    with house(tmp_path, source=APP):
        pass
    runner = plain.bench.open_runner(0, "sync")
    plain.run(runner, "add", 1, 1)
    found = Path(f"/proc/{plain.born(runner)}/cgroup").read_text()
    assert ("/runner-1" in found) == (plain.manifest.containment.startswith("cgroup"))


def test_containment_says_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert detect("0", cgroup=False).describe().startswith("subreaper")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert detect("0").describe().startswith("process groups only")


def test_closing_the_bench_leaves_nothing(home: House, tmp_path: Path) -> None:
    runner = home.bench.open_runner(0, "sync")
    runner.send([frame(1, "leave_daemon", str(tmp_path / "daemon"), "wait")])
    daemon, pid = read_pid(tmp_path / "daemon"), home.born(runner)
    home.bench.close()
    assert gone_within(pid, 1)
    assert gone_within(daemon, 1)


# The nursery ----------------------------------------------------------------------------------


def test_a_killed_nursery_takes_its_runners_along_and_can_be_replaced(home: House, tmp_path: Path) -> None:
    runners = [home.bench.open_runner(slot, "sync") for slot in (0, 1)]
    runners[0].send([frame(1, "leave_daemon", str(tmp_path / "daemon"), "wait")])
    runners[1].send([frame(2, "add", 1, 1), frame(3, "wait_for", str(tmp_path / "go")), frame(4, "add", 1, 1)])
    wait_until((tmp_path / "go.entered").exists, "the job is entered")
    wait_until((tmp_path / "daemon.entered").exists, "the daemon is there")
    pids = [home.born(runner) for runner in runners]
    nursery, _ = home.trace.nursery()
    os.kill(nursery, signal.SIGKILL)
    assert home.wait_event(NurseryGone).cause == "killed by SIGKILL (signal 9)"
    exits = sorted((home.wait_event(RunnerExit) for _ in pids), key=lambda found: found.slot)
    assert [(found.pid, found.entered) for found in exits] == [(pids[0], 1), (pids[1], 3)]
    assert {found.cause for found in exits} == {"exit status unknown: the nursery died"}
    assert all(gone_within(pid, 1) for pid in (*pids, read_pid(tmp_path / "daemon")))
    assert [done.token for done in runners[1].read()] == [2]
    assert runners[1].retract() == [4]
    home.bench.close()
    home.bench.start()
    home.bench.equip(home.trace, "w-test")
    again = home.bench.open_runner(0, "sync")
    assert home.run(again, "add", 1, 1).outcome == Succeeded(b"2")


# The lease ------------------------------------------------------------------------------------


def test_a_lease_that_ends_kills_the_runner_even_inside_c_code(plain: House, tmp_path: Path) -> None:
    runner = plain.bench.open_runner(0, "sync")
    runner.send([frame(1, "hold_the_gil", 600, str(tmp_path / "in"))])
    wait_until((tmp_path / "in").exists, "the job is entered")
    plain.trace.set_kill_at(0, host.boottime_s() + 0.1)
    found = plain.exit_of(runner)
    assert found.cause == "killed by SIGKILL (signal 9): its lease had ended"
    assert found.entered == 1


def test_a_runner_ends_itself_when_even_its_nursery_is_frozen(plain: House, tmp_path: Path) -> None:
    runner = plain.bench.open_runner(0, "sync")
    runner.send([frame(1, "wait_for", str(tmp_path / "go"))])
    pid = plain.born(runner)
    wait_until((tmp_path / "go.entered").exists, "the job is entered")
    nursery, _ = plain.trace.nursery()
    os.kill(nursery, signal.SIGSTOP)
    try:
        plain.trace.set_kill_at(0, host.boottime_s() + 0.1)
        assert gone_within(pid, 3)
    finally:
        os.kill(nursery, signal.SIGCONT)


def test_the_pulse_beats_and_stops_inside_c_code(plain: House, tmp_path: Path) -> None:
    runner = plain.bench.open_runner(0, "sync")
    first = wait_until(lambda: plain.trace.last_pulse_s(0), "a first pulse")
    wait_until(lambda: plain.trace.last_pulse_s(0) > first, "the next pulse")
    runner.send([frame(1, "hold_the_gil", 1, str(tmp_path / "in"))])
    wait_until((tmp_path / "in").exists, "the job is entered")
    wait_until(lambda: host.boottime_s() - plain.trace.last_pulse_s(0) > 0.5, "a silent pulse")
    assert plain.finish(runner)[0].outcome == Succeeded(b"null")
    wait_until(lambda: host.boottime_s() - plain.trace.last_pulse_s(0) < 0.3, "a pulse again")


# The worker -----------------------------------------------------------------------------------

WORKER = """
import sys, time
from pathlib import Path
from tests.crash.bench_kit import frame, house
folder = Path(sys.argv[1])
with house(folder, cgroup=sys.argv[2] == "cgroup") as home:
    first, second = (home.bench.open_runner(slot, "sync") for slot in (0, 1))
    first.send([frame(1, "leave_daemon", str(folder / "daemon"), "wait")])
    second.send([frame(2, "hold_the_gil", 600, str(folder / "in"))])
    home.born(second)
    Path(folder, "family.new").write_text(f"{home.trace.nursery()[0]} {home.born(first)} {home.born(second)}")
    Path(folder, "trace").symlink_to(home.trace.path)
    Path(folder, "family.new").rename(folder / "family")
    time.sleep(600)
"""


@pytest.fixture(params=["cgroup", "subreaper"])
def worker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process of its own that stands for a worker, with a nursery, two runners and a daemon below it."""
    process = subprocess.Popen([sys.executable, "-c", WORKER, str(tmp_path), request.param])
    try:
        for name in ("family", "in", "daemon.entered"):
            wait_until((tmp_path / name).exists, f"{name} below the worker")
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()


def below(folder: Path) -> list[int]:
    return [*map(int, (folder / "family").read_text().split()), read_pid(folder / "daemon")]


def test_a_killed_worker_takes_everything_along(worker: subprocess.Popen[bytes], tmp_path: Path) -> None:
    killed_at = time.monotonic()
    worker.kill()
    for pid in below(tmp_path):
        assert gone_within(pid, max(0.0, killed_at + 1 - time.monotonic()))


def test_what_is_left_when_nobody_could_clean_up_is_found_by_its_mark(
    worker: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    nursery, *_ = below(tmp_path)
    os.kill(nursery, signal.SIGSTOP)
    worker.kill()
    assert scene.clear(str((tmp_path / "trace").resolve())).cleared
    assert all(gone_within(pid, 1) for pid in below(tmp_path))


def test_the_nursery_keeps_the_lease_of_a_frozen_worker(worker: subprocess.Popen[bytes], tmp_path: Path) -> None:
    nursery, first, second, daemon = below(tmp_path)
    trace = Trace.open((tmp_path / "trace").resolve())
    worker.send_signal(signal.SIGSTOP)
    trace.set_kill_at(0, host.boottime_s() + 0.2)
    assert gone_within(first, 2)
    assert gone_within(daemon, 1)
    assert not gone_within(second, 0)
    assert not gone_within(nursery, 0)
    trace.close()


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


# Apps that cannot be forked -------------------------------------------------------------------


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
        runner = home.bench.open_runner(0, "sync")
        assert home.run(runner, "add", 1, 2).outcome == Succeeded(b"3")
        assert home.run(runner, "say", "words", "errors").stderr == b"errors"
        loop = home.bench.open_runner(1, "async")
        assert home.run(loop, "asay", "words").stdout == b"words\n"
        runner.send([frame(1, "leave_daemon", str(tmp_path / "daemon"), "7")])
        assert home.exit_of(runner).cause == "exited with code 7"
        assert gone_within(read_pid(tmp_path / "daemon"), 1)
        nursery, _ = home.trace.nursery()
        os.kill(nursery, signal.SIGKILL)
        home.wait_event(NurseryGone)
        assert gone_within(home.born(loop), 1)


def test_a_spawned_runner_that_cannot_import_says_so(tmp_path: Path) -> None:
    source = f"{APP}\nimport socket; kept = socket.socket()\nassert not os.path.exists('broken'), 'broken now'\n"
    with house(tmp_path, source=source) as home:
        (tmp_path / "broken").touch()
        runner = home.bench.open_runner(0, "sync")
        found = home.exit_of(runner)
        assert found.cause == "exited with code 78: it could not import the app"
        assert b"broken now" in runner.last_output()[1]


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
