"""What a runner may start and open is bounded, and what a job leaves behind is gone, with cgroups and without."""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.fleet import wait_for
from tests.support.runner_pool import RunnerPoolHarness, frame, gone_within, house, read_pid
from tests.support.signals import OwnProcess, send_signal

from unstuck.domain.endings import Raised, Succeeded
from unstuck.runner import cgroups
from unstuck.runner.linux import OOM_SCORE

ROOT = Path(__file__).resolve().parents[2]
MOST = 40
FILES = 200

BOMB = f"""
tokens, put = os.pipe()
os.write(put, b"." * {MOST * 6})
os.set_blocking(tokens, False)
until_s = time.monotonic() + 20
while time.monotonic() < until_s:
    try:
        if os.read(tokens, 1) and os.fork() == 0:
            os.setsid()
            signal.alarm(20)
    except OSError:
        time.sleep(0.001)
os._exit(0)
"""


@pytest.fixture(params=["cgroup", "subreaper"])
def home(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RunnerPoolHarness]:
    monkeypatch.setenv("UNSTUCK_MAX_PROCESSES", str(MOST))
    with house(tmp_path, cgroup=request.param == "cgroup", pulse_interval_s=0.1) as built:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        fork_server = wait_for(lambda: built.trace.fork_server()[0], "the fork server to be configured")
        resource.prlimit(fork_server, resource.RLIMIT_NOFILE, (FILES, hard))  # runners inherit it
        yield built


def below(pid: int) -> list[OwnProcess]:
    return OwnProcess(pid).children(recursive=True)


# Processes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_crowd_in_sessions_of_its_own_is_ended_to_the_last(home: RunnerPoolHarness, kind: str) -> None:
    runner, sibling = home.bench.start_runner(0, kind), home.bench.start_runner(1, "sync")  # type: ignore[arg-type]
    runner.send([frame(1, "evaluate" if kind == "sync" else "aevaluate", BOMB)])
    found = home.exit_of(runner)
    assert found.cause == f"killed by SIGKILL (signal 9): it started more than {MOST} processes"
    assert (found.entered, found.oom) == (1 if kind == "sync" else 0, False)
    fork_server = home.trace.fork_server()[0]
    wait_for(lambda: [p.pid for p in below(fork_server)] == [home.born(sibling)], "only the sibling is left", 10)
    assert home.run(sibling, "add", 1, 1).outcome == Succeeded(b"2")


def test_a_crowd_within_the_limit_is_left_alone(home: RunnerPoolHarness) -> None:
    runner = home.bench.start_runner(0, "sync")
    # It stays for several looks at how many there are.
    text = "children = [subprocess.Popen(['sleep', '600']) for _ in range(20)]; time.sleep(1)"
    assert home.run(runner, "evaluate", text).outcome == Succeeded(b"null")
    assert below(home.born(runner)) == []


def test_the_rooms_of_the_dead_are_taken_down(home: RunnerPoolHarness) -> None:
    runner = home.bench.start_runner(0, "sync")
    home.run(runner, "add", 1, 1)
    lines = Path(f"/proc/{home.born(runner)}/cgroup").read_text().splitlines()
    rooms = {line.rpartition("/unstuck-")[2] for line in lines if "/unstuck-" in line and "/runner-" in line}
    runner.kill()
    home.exit_of(runner)
    base = cgroups.own()
    wait_for(lambda: base is None or not any((base / f"unstuck-{room}").exists() for room in rooms), "no room", 5)
    assert bool(rooms) == home.manifest.containment.startswith("cgroup")


def test_what_a_job_leaves_dies_however_it_hides(home: RunnerPoolHarness, tmp_path: Path) -> None:
    text = f"""
def hide(name):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.setsid()
    if os.fork():
        os._exit(0)
    if os.fork():  # somebody who would see it die, and start another
        while True:
            time.sleep(0.01)
            if os.fork() == 0:
                time.sleep(600)
    Path({str(tmp_path)!r}, name + ".new").write_text(str(os.getpid()))
    os.rename({str(tmp_path)!r} + f"/{{name}}.new", {str(tmp_path)!r} + f"/{{name}}")
    time.sleep(600)

for name in ("first", "second"):
    if os.fork() == 0:
        hide(name)
while not all(os.path.exists({str(tmp_path)!r} + "/" + name) for name in ("first", "second")):
    time.sleep(0.001)
"""
    runner = home.bench.start_runner(0, "sync")
    assert home.run(runner, "evaluate", text).outcome == Succeeded(b"null")
    assert all(gone_within(read_pid(tmp_path / name)) for name in ("first", "second"))
    assert below(home.born(runner)) == []
    assert home.run(runner, "add", 1, 1).outcome == Succeeded(b"2")


# Descriptors ----------------------------------------------------------------------------------


def test_a_leak_of_descriptors_fails_its_own_job_and_not_the_next(home: RunnerPoolHarness) -> None:
    runner = home.bench.start_runner(0, "sync")
    leak = "globals()['kept'] = []\nwhile True: kept.append(os.open('/dev/null', os.O_RDONLY))"
    runner.send([frame(1, "evaluate", leak), frame(2, "add", 1, 1)])
    done = home.finish(runner)[0]
    assert isinstance(done.outcome, Raised)
    assert (done.outcome.type, "Too many open files" in done.outcome.message) == ("OSError", True)
    assert b"the runner is replaced" in done.stderr
    assert home.exit_of(runner).exit_code == 0
    assert runner.take_back() == [2], "it was never entered, and goes to the next runner"


def test_jobs_that_leave_descriptors_open_wear_out_their_runner_before_it_has_none(home: RunnerPoolHarness) -> None:
    runner = home.bench.start_runner(0, "sync")
    keep = "globals().setdefault('kept', []).extend(os.open('/dev/null', os.O_RDONLY) for _ in range(9))"
    runner.send([frame(token, "evaluate", keep) for token in range(1, 21)])
    assert home.exit_of(runner).exit_code == 0
    done = runner.read()
    assert all(item.outcome == Succeeded(b"null") for item in done)
    assert b"descriptors open; the runner is replaced" in done[-1].stderr
    assert runner.take_back() == list(range(len(done) + 1, 21))


def test_a_child_that_is_left_when_no_descriptor_is_free_dies_all_the_same(home: RunnerPoolHarness) -> None:
    runner = home.bench.start_runner(0, "sync")
    text = """
child = os.fork()
if child == 0:
    time.sleep(600)
print(child, flush=True)
globals()['kept'] = []
while True: kept.append(os.dup(0))
"""
    runner.send([frame(1, "evaluate", text)])
    child = int(wait_for(lambda: runner.peek_output()[0].split(), "the child's pid")[0])
    home.exit_of(runner)
    assert gone_within(child)


# Memory ---------------------------------------------------------------------------------------


def test_the_kernel_takes_a_job_before_its_runner_s_worker(home: RunnerPoolHarness) -> None:
    def score(pid: int | str) -> int:
        return int(Path(f"/proc/{pid}/oom_score_adj").read_text())

    runner = home.bench.start_runner(0, "sync")
    text = """subprocess.run(["cat", "/proc/self/oom_score_adj"], capture_output=True, text=True).stdout.strip()"""
    child = home.run(runner, "result_of", text).outcome
    mine = score(home.born(runner))
    assert child == Succeeded(b'"%d"' % mine)
    assert mine >= OOM_SCORE
    assert score(os.getpid()) < mine
    assert score(home.trace.fork_server()[0]) == score(os.getpid())


LIKELY_VICTIM = """
import sys
from pathlib import Path
from tests.support.runner_pool import house
from unstuck.domain.endings import Succeeded

Path("/proc/self/oom_score_adj").write_text("700")  # as a container may have it
with house(Path(sys.argv[1])) as crowded:
    runner = crowded.bench.start_runner(0, "sync")
    text = "open('/proc/self/oom_score_adj').read().strip()"
    assert crowded.run(runner, "result_of", text).outcome == Succeeded(b'"800"')
"""


def test_where_everybody_is_a_likely_victim_a_runner_is_a_likelier_one(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIKELY_VICTIM, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_plain_kill_is_no_death_by_memory(home: RunnerPoolHarness, tmp_path: Path) -> None:
    runner = home.bench.start_runner(0, "sync")
    runner.send([frame(1, "wait_for", str(tmp_path / "go"))])
    wait_for((tmp_path / "go.entered").exists, "the job is entered")
    send_signal(home.born(runner), signal.SIGKILL)
    found = home.exit_of(runner)
    assert (found.cause, found.oom, found.oom_sure, found.oom_words) == (
        "killed by SIGKILL (signal 9)",
        False,
        False,
        "",
    )
