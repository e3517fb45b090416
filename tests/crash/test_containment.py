"""Whoever dies below a worker takes along what was below it, and nothing stays behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.fleet import wait_for
from tests.support.runner_pool import APP, RunnerPoolHarness, frame, gone_within, house, read_pid
from tests.support.signals import send_signal

from unstuck import host
from unstuck.domain.endings import Succeeded
from unstuck.recovery import leftovers
from unstuck.runner.containment import detect
from unstuck.runner.status_page import StatusPage
from unstuck.worker.fork_client import ForkServerDied, RunnerExit


@pytest.fixture(params=["cgroup", "subreaper"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RunnerPoolHarness]:
    with house(tmp_path, cgroup=request.param == "cgroup", max_output_bytes=10_000, pulse_interval_s=0.1) as built:
        yield built


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[RunnerPoolHarness]:
    with house(tmp_path, max_output_bytes=10_000, pulse_interval_s=0.1) as built:
        yield built


# Grandchildren --------------------------------------------------------------------------------


def test_children_that_a_job_leaves_die_with_it(home: RunnerPoolHarness, tmp_path: Path) -> None:
    runner = home.bench.start_runner(0, "sync")
    done = home.run(runner, "leave_child", ["sleep", "600"])
    assert isinstance(done.outcome, Succeeded)
    assert gone_within(int(done.outcome.result))


def test_a_daemon_that_a_job_leaves_dies_with_it(home: RunnerPoolHarness, tmp_path: Path) -> None:
    runner = home.bench.start_runner(0, "sync")
    done = home.run(runner, "leave_daemon", str(tmp_path / "daemon"))
    assert done.outcome == Succeeded(b"null")
    assert gone_within(read_pid(tmp_path / "daemon"))
    assert home.run(runner, "add", 1, 1).outcome == Succeeded(b"2")


@pytest.mark.parametrize("then", ["wait", "3"])
def test_a_daemon_dies_with_a_runner_that_dies(home: RunnerPoolHarness, tmp_path: Path, then: str) -> None:
    runner = home.bench.start_runner(0, "sync")
    runner.send([frame(1, "leave_daemon", str(tmp_path / "daemon"), then)])
    daemon = read_pid(tmp_path / "daemon")
    if then == "wait":
        home.born(runner)
        runner.kill()
    home.exit_of(runner)
    assert gone_within(daemon)


def test_a_crowd_of_daemons_dies_to_the_last(home: RunnerPoolHarness, tmp_path: Path) -> None:
    runner = home.bench.start_runner(0, "sync")
    text = f"for n in range(20): daemon({str(tmp_path)!r} + f'/d{{n}}')"
    assert home.run(runner, "evaluate", text).outcome == Succeeded(b"null")
    assert all(gone_within(read_pid(tmp_path / f"d{n}")) for n in range(20))


def test_a_new_fork_server_leaves_the_rooms_of_the_living_alone(plain: RunnerPoolHarness, tmp_path: Path) -> None:
    with house(tmp_path, source=APP):
        pass
    runner = plain.bench.start_runner(0, "sync")
    plain.run(runner, "add", 1, 1)
    found = Path(f"/proc/{plain.born(runner)}/cgroup").read_text()
    assert ("/runner-1" in found) == (plain.manifest.containment.startswith("cgroup"))


def test_containment_says_what_it_is() -> None:
    assert detect("0", cgroup=False).describe().startswith("subreaper")


def test_closing_the_bench_leaves_nothing(home: RunnerPoolHarness, tmp_path: Path) -> None:
    runner = home.bench.start_runner(0, "sync")
    runner.send([frame(1, "leave_daemon", str(tmp_path / "daemon"), "wait")])
    daemon, pid = read_pid(tmp_path / "daemon"), home.born(runner)
    home.bench.close()
    assert gone_within(pid)
    assert gone_within(daemon)


# The fork server ----------------------------------------------------------------------------------


def test_a_killed_fork_server_takes_its_runners_along_and_can_be_replaced(
    home: RunnerPoolHarness, tmp_path: Path
) -> None:
    runners = [home.bench.start_runner(slot, "sync") for slot in (0, 1)]
    runners[0].send([frame(1, "leave_daemon", str(tmp_path / "daemon"), "wait")])
    runners[1].send([frame(2, "add", 1, 1), frame(3, "wait_for", str(tmp_path / "go")), frame(4, "add", 1, 1)])
    wait_for((tmp_path / "go.entered").exists, "the job is entered")
    wait_for((tmp_path / "daemon.entered").exists, "the daemon is there")
    pids = [home.born(runner) for runner in runners]
    fork_server, _ = home.trace.fork_server()
    send_signal(fork_server, signal.SIGKILL)
    assert home.wait_event(ForkServerDied).cause == "killed by SIGKILL (signal 9)"
    exits = sorted((home.wait_event(RunnerExit) for _ in pids), key=lambda found: found.slot)
    assert [(found.pid, found.entered) for found in exits] == [(pids[0], 1), (pids[1], 3)]
    assert {found.cause for found in exits} == {"exit status unknown: the fork server died"}
    assert all(gone_within(pid) for pid in (*pids, read_pid(tmp_path / "daemon")))
    assert [done.token for done in runners[1].read()] == [2]
    assert runners[1].take_back() == [4]
    home.bench.close()
    home.bench.start()
    home.bench.configure(home.trace, "w-test")
    again = home.bench.start_runner(0, "sync")
    assert home.run(again, "add", 1, 1).outcome == Succeeded(b"2")


# The lease ------------------------------------------------------------------------------------


def test_a_lease_that_ends_kills_the_runner_even_inside_c_code(plain: RunnerPoolHarness, tmp_path: Path) -> None:
    runner = plain.bench.start_runner(0, "sync")
    runner.send([frame(1, "hold_the_gil", 600, str(tmp_path / "in"))])
    wait_for((tmp_path / "in").exists, "the job is entered")
    plain.trace.set_lease_end(0, host.boottime_s() + 0.1)
    found = plain.exit_of(runner)
    assert found.cause == "killed by SIGKILL (signal 9): its lease had ended"
    assert found.entered == 1


def test_a_runner_ends_itself_when_even_its_fork_server_is_frozen(plain: RunnerPoolHarness, tmp_path: Path) -> None:
    runner = plain.bench.start_runner(0, "sync")
    runner.send([frame(1, "wait_for", str(tmp_path / "go"))])
    pid = plain.born(runner)
    wait_for((tmp_path / "go.entered").exists, "the job is entered")
    fork_server, _ = plain.trace.fork_server()
    send_signal(fork_server, signal.SIGSTOP)
    try:
        plain.trace.set_lease_end(0, host.boottime_s() + 0.1)
        assert gone_within(pid)
    finally:
        send_signal(fork_server, signal.SIGCONT)


def test_the_pulse_beats_and_stops_inside_c_code(plain: RunnerPoolHarness, tmp_path: Path) -> None:
    runner = plain.bench.start_runner(0, "sync")
    first = wait_for(lambda: plain.trace.last_pulse_s(0), "a first pulse")
    wait_for(lambda: plain.trace.last_pulse_s(0) > first, "the next pulse")
    os.mkfifo(tmp_path / "pipe")
    runner.send([frame(1, "hold_the_gil_until_opened", str(tmp_path / "pipe"), str(tmp_path / "in"))])
    wait_for((tmp_path / "in").exists, "the job is entered")
    wait_for(lambda: host.boottime_s() - plain.trace.last_pulse_s(0) > 0.5, "a silent pulse")
    with (tmp_path / "pipe").open("r+b", buffering=0):
        done = plain.finish(runner)
    assert done[0].outcome == Succeeded(b"null")
    wait_for(lambda: host.boottime_s() - plain.trace.last_pulse_s(0) < 0.3, "a pulse again")


# The worker -----------------------------------------------------------------------------------

WORKER = """
import sys, time
from pathlib import Path
from tests.support.runner_pool import frame
from tests.support.runner_pool import house
folder = Path(sys.argv[1])
with house(folder, cgroup=sys.argv[2] == "cgroup") as home:
    first, second = (home.bench.start_runner(slot, "sync") for slot in (0, 1))
    first.send([frame(1, "leave_daemon", str(folder / "daemon"), "wait")])
    second.send([frame(2, "hold_the_gil", 600, str(folder / "in"))])
    home.born(second)
    Path(folder, "family.new").write_text(f"{home.trace.fork_server()[0]} {home.born(first)} {home.born(second)}")
    Path(folder, "trace").symlink_to(home.trace.path)
    Path(folder, "family.new").rename(folder / "family")
    time.sleep(600)
"""


@pytest.fixture(params=["cgroup", "subreaper"])
def worker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process of its own that stands for a worker, with a fork server, two runners and a daemon below it."""
    process = subprocess.Popen([sys.executable, "-c", WORKER, str(tmp_path), request.param])
    try:
        for name in ("family", "in", "daemon.entered"):
            wait_for((tmp_path / name).exists, f"{name} below the worker")
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()


def below(folder: Path) -> list[int]:
    return [*map(int, (folder / "family").read_text().split()), read_pid(folder / "daemon")]


def test_a_killed_worker_takes_everything_along(worker: subprocess.Popen[bytes], tmp_path: Path) -> None:
    worker.kill()
    for pid in below(tmp_path):
        assert gone_within(pid)


def test_what_is_left_when_nobody_could_clean_up_is_found_by_its_mark(
    worker: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    fork_server, *_ = below(tmp_path)
    send_signal(fork_server, signal.SIGSTOP)
    worker.kill()
    assert leftovers.kill(str((tmp_path / "trace").resolve())).all_gone
    assert all(gone_within(pid) for pid in below(tmp_path))


def test_the_fork_server_keeps_the_lease_of_a_frozen_worker(worker: subprocess.Popen[bytes], tmp_path: Path) -> None:
    fork_server, first, second, daemon = below(tmp_path)
    trace = StatusPage.open((tmp_path / "trace").resolve())
    worker.send_signal(signal.SIGSTOP)
    trace.set_lease_end(0, host.boottime_s() + 0.2)
    assert gone_within(first)
    assert gone_within(daemon)
    assert not gone_within(second, 0)
    assert not gone_within(fork_server, 0)
    trace.close()
