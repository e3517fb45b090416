"""A runner says where its threads stand whatever its jobs did to it, and nobody notices that it was asked."""

import select
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.crash.bench_kit import House, frame, house
from tests.fleet import wait_for

from unstuck.domain.outcomes import Succeeded
from unstuck.worker.bench import Runner

SIGNS = "import gc; signs = next(one for one in gc.get_objects() if type(one).__name__ == 'Signs').fileno()\n"


@pytest.fixture
def home(tmp_path: Path) -> Iterator[House]:
    with house(tmp_path, pulse_interval_s=0.1) as built:
        yield built


@pytest.fixture
def runner(home: House) -> Runner:
    opened = home.bench.open_runner(0, "sync")
    home.born(opened)
    return opened


def hear(runner: Runner) -> bool:
    """Take what the pulse says; True when it has answered the last question."""
    select.select([runner.signs], [], [], 0.01)
    for sign in runner.read_signs():
        if sign.noted:
            runner.stacks.heard(sign.token)
    return runner.stacks.told


def asked(runner: Runner) -> str:
    runner.stacks.forget()
    assert runner.stacks.ask()
    wait_for(lambda: hear(runner), "an answer")
    return runner.stacks.text()


def test_a_runner_is_asked_without_a_signal(home: House, runner: Runner, tmp_path: Path) -> None:
    # A signal would end the wait in C, and what it returns would be seen.
    code = "left = ctypes.CDLL(None).poll(None, 0, 3000); assert left == 0, left"
    runner.send([frame(1, "evaluate", f"Path({str(tmp_path / 'in')!r}).touch(); {code}")])
    wait_for((tmp_path / "in").exists, "the job is entered")
    wait_for(lambda: "in evaluate" in asked(runner), "the stack of the job")
    assert "unstuck/runner" not in runner.stacks.text()
    assert home.finish(runner)[0].outcome == Succeeded(b"null")


def test_an_answer_that_nobody_waits_for_is_not_told_with_a_later_death(home: House, runner: Runner) -> None:
    runner.stacks.ask()
    runner.stacks.forget()
    wait_for(lambda: hear(runner), "an answer")
    runner.send([frame(1, "segfault")])
    home.exit_of(runner)
    assert runner.stacks.text().startswith("Fatal Python error: Segmentation fault")


def test_a_runner_that_forked_answers_itself(home: House, runner: Runner, tmp_path: Path) -> None:
    fork = f"child = os.fork() or (Path({str(tmp_path / 'child')!r}).touch(), time.sleep(600))"
    wait = f"while not os.path.exists({str(tmp_path / 'end')!r}): time.sleep(0.001)"
    runner.send([frame(1, "evaluate", f"{fork}\n{wait}\nos.kill(child, 9); os.waitpid(child, 0)")])
    wait_for((tmp_path / "child").exists, "the child")
    for _ in range(20):
        assert "in evaluate" in asked(runner)
    (tmp_path / "end").touch()
    assert home.finish(runner)[0].outcome == Succeeded(b"null")


def test_where_a_job_closed_what_it_is_asked_by_there_is_still_the_signal(
    home: House, runner: Runner, tmp_path: Path
) -> None:
    wait = f"while not os.path.exists({str(tmp_path / 'end')!r}): time.sleep(0.001)"
    runner.send([frame(1, "evaluate", f"{SIGNS}os.close(signs)\n{wait}")])
    wait_for(lambda: not runner.stacks.ask(), "nobody to listen")
    assert runner.dump_stack()
    wait_for(lambda: "in evaluate" in runner.stacks.text(), "the stack")
    (tmp_path / "end").touch()
    assert home.finish(runner)[0].outcome == Succeeded(b"null")


def test_a_socket_of_the_job_with_the_number_of_ours_is_left_alone(home: House, runner: Runner, tmp_path: Path) -> None:
    mine = "import socket; a, b = socket.socketpair(); os.dup2(a.fileno(), signs)\nb.send(b'12345678')\n"
    wait = f"while not os.path.exists({str(tmp_path / 'end')!r}): time.sleep(0.001)\n"
    begin = f"{SIGNS}{mine}Path({str(tmp_path / 'in')!r}).touch()\n{wait}"
    runner.send([frame(1, "evaluate", f"{begin}a.setblocking(False); assert a.recv(100) == b'12345678'")])
    wait_for((tmp_path / "in").exists, "the job is entered")
    after_s = home.trace.last_pulse_s(0) + 0.3
    wait_for(lambda: home.trace.last_pulse_s(0) > after_s, "some pulses, of which each might have read it")
    (tmp_path / "end").touch()
    assert home.finish(runner)[0].outcome == Succeeded(b"null")


def test_a_job_that_reset_every_signal_is_asked_all_the_same(home: House, runner: Runner, tmp_path: Path) -> None:
    reset = "import faulthandler\nfor number in range(34, 65): signal.signal(number, signal.SIG_DFL)"
    wait = f"while not os.path.exists({str(tmp_path / 'end')!r}): time.sleep(0.001)"
    runner.send([frame(1, "evaluate", f"{reset}\n{wait}")])
    wait_for(lambda: "in evaluate" in asked(runner), "the stack")
    (tmp_path / "end").touch()
    assert home.finish(runner)[0].outcome == Succeeded(b"null")


def test_who_holds_the_interpreter_in_another_thread_is_seen_by_a_signal(
    home: House, runner: Runner, tmp_path: Path
) -> None:
    # One call into C says that it has begun and stays there: between two of them others may run.
    hold = f"def hold_it(): ctypes.PyDLL(None).system(b'touch {tmp_path / 'in'}; exec sleep 600')"
    runner.send([frame(1, "evaluate", f"{hold}\nthreading.Thread(target=hold_it).start()\ntime.sleep(600)")])
    wait_for((tmp_path / "in").exists, "the thread")
    assert runner.stacks.ask()
    assert runner.dump_stack(silent=True)
    both = ("in hold_it", "in evaluate")
    wait_for(lambda: all(words in runner.stacks.text() for words in both), "the stacks of both threads")
    assert not hear(runner)
    runner.kill()
    assert home.exit_of(runner).signal == signal.SIGKILL
