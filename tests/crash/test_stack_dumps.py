"""A job that seems to hang is asked where it stands, and goes on as if nobody had."""

import json
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from tests.crash.conftest import MakeFleet
from tests.support.fleet import ROOT, Fleet, wait_for
from tests.support.runner_pool import RunnerPoolHarness, frame, house

from unstuck import DeadlineExceeded
from unstuck.client.job import Job
from unstuck.client.operator import Operator
from unstuck.domain.endings import Succeeded
from unstuck.domain.events import EventKind
from unstuck.domain.states import JobState
from unstuck.worker.runner_process import RunnerProcess

QUESTIONS = 30
BUSY_THREADS = 5


def stack_of(fleet: Fleet, job_id: int) -> str:
    told = [event.message for event in fleet.ledger.events.list(job_id=job_id) if event.kind == EventKind.STACK]
    return told[-1] if told else ""


def told_within(fleet: Fleet, job_id: int, patience_s: float) -> bool:
    try:
        return wait_for(lambda: "in nap" in stack_of(fleet, job_id), "its stack", patience_s)
    except AssertionError:
        return False


def test_the_stack_of_a_running_job_is_told_and_the_job_goes_on(fleet: Fleet) -> None:
    fleet.start()
    job, runner = fleet.begin("nap", 600)
    operator = Operator(fleet.ledger, fleet.app.settings)

    def asked_and_told() -> bool:
        # A ring may be lost: whoever hears nothing asks again.
        assert operator.jobs.ask_stack(job.id)
        return told_within(fleet, job.id, 2.0)

    wait_for(asked_and_told, "its stack")
    assert "Somebody asked where it stands." in [step.text for step in operator.why(job.id).steps]
    assert fleet.state(job) is JobState.RUNNING
    assert runner in {process.pid for process in fleet.workers[0].runners()}


def ask_until(fleet: Fleet, job_id: int, words: str) -> str:
    operator = Operator(fleet.ledger, fleet.app.settings)

    def told() -> bool:
        # A ring may be lost: whoever hears nothing asks again.
        assert operator.jobs.ask_stack(job_id)
        try:
            return wait_for(lambda: words in stack_of(fleet, job_id), "its stack", 2.0)
        except AssertionError:
            return False

    wait_for(told, f"a stack with {words!r}, and not {stack_of(fleet, job_id)!r}")
    return stack_of(fleet, job_id)


def test_an_async_job_tells_where_it_waits_and_not_where_its_loop_does(fleet: Fleet) -> None:
    fleet.start()
    other, _ = fleet.begin("nap_async", 600)
    job, _ = fleet.begin("wait_for_many", 600)
    stack = ask_until(fleet, job.id, "_wait_inside")
    assert stack.startswith(f"Task of job {job.id} ")
    assert "in wait_for_many" in stack
    assert "that it started" in stack
    assert "in nap_async" not in stack, "that is another job"
    assert "select" not in stack
    # Both at once: each is told its own.
    stack = ask_until(fleet, other.id, "in nap_async")
    assert "wait_for_many" not in stack
    assert {fleet.state(one) for one in (job, other)} == {JobState.RUNNING}


def test_a_job_whose_loop_is_blocked_is_told_by_whom(fleet: Fleet) -> None:
    fleet.start()
    job, _ = fleet.begin("nap_async", 600)
    blocker, _ = fleet.begin("block_the_loop", 600)
    stack = ask_until(fleet, job.id, "in block")
    assert "does not turn" in stack
    assert "tasks.py" in stack

    def told() -> list[str]:
        return [
            one.message for one in fleet.ledger.events.list(job_id=blocker.id) if one.kind == EventKind.LOOP_BLOCKED
        ]

    [message] = wait_for(told, "the one that blocks to be named")
    assert "shares with 1 other job from turning" in message


def test_the_command_shows_where_a_job_stands(fleet: Fleet) -> None:
    fleet.start()
    job, _ = fleet.begin("nap", 600)

    def stack(number: int, *more: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "unstuck.cli.main", "stack", str(number), *more]
        return subprocess.run(
            command, cwd=ROOT, env=fleet.surroundings(), capture_output=True, text=True, timeout=90, check=False
        )

    shown = stack(job.id, "--wait", "60")
    assert shown.returncode == 0, shown
    assert "in nap" in shown.stdout
    assert "in nap" in json.loads(stack(job.id, "--wait", "60", "--json").stdout)["stack"]
    assert "unstuck stack" in [action.command.rpartition(" ")[0] for action in fleet.app.operator.why(job.id).actions]
    nobody = stack(fleet.task("add").options(queue="other", delay="1h").enqueue(1, 2).id)
    assert nobody.returncode == 1
    assert "does not run" in nobody.stderr


def test_what_does_not_run_has_no_stack(fleet: Fleet) -> None:
    job = fleet.task("add").enqueue(1, 2)
    assert not Operator(fleet.ledger, fleet.app.settings).jobs.ask_stack(job.id)


def begin_among_busy_threads(fleet: Fleet, task: str) -> tuple[Job, Path]:
    """Begin a job that ends with a file, and give both."""
    notes = fleet.folder / task
    job = fleet.task(task).enqueue(BUSY_THREADS, str(notes))
    wait_for(lambda: notes.exists() and "\n" in notes.read_text(), f"job {job.id} to begin")
    return job, notes.with_suffix(".end")


def test_a_job_with_busy_threads_may_be_asked_as_often_as_one_likes(fleet: Fleet) -> None:
    fleet.start()
    job, end = begin_among_busy_threads(fleet, "wait_among_busy_threads")
    operator = Operator(fleet.ledger, fleet.app.settings)

    def told() -> list[str]:
        events = fleet.ledger.events.list(job_id=job.id, limit=1000)
        return [event.message for event in events if event.kind == EventKind.STACK]

    def asked(known: int) -> bool:
        # A ring may be lost: whoever hears nothing asks again.
        assert operator.jobs.ask_stack(job.id), f"it does not run any more: {job.record()}"
        try:
            return wait_for(lambda: len(told()) > known, "a stack more", 3.0)
        except AssertionError:
            return False

    for known in range(QUESTIONS):
        wait_for(partial(asked, known), f"stack {known + 1}")
    # A signal shows the job's thread alone: on a machine that is so busy that the pulse does not come in time.
    by_pulse = [stack for stack in told() if not stack.startswith("Stack (")]
    assert by_pulse
    for stack in by_pulse:
        head, *threads = stack.split("\n\n")
        assert head.startswith("Current thread 0x"), "the job's own comes first"
        assert "in wait_among_busy_threads" in head
        assert [thread.count(" in _churn") for thread in threads] == [1] * BUSY_THREADS, stack
    end.touch()
    assert job.result(timeout=30) == "ended well"
    assert len(fleet.ledger.jobs.attempts(job.id)) == 1


def test_the_deadlines_of_others_do_not_kill_a_loop_with_busy_threads(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(stop_grace="60s")
    fleet.start("--concurrency", str(QUESTIONS + 1))
    sibling, end = begin_among_busy_threads(fleet, "await_among_busy_threads")
    late = [fleet.task("hang_async").enqueue("sleep") for _ in range(QUESTIONS)]
    for job in late:
        with pytest.raises(DeadlineExceeded):
            job.result(timeout=60)
        autopsy = fleet.ledger.jobs.attempts(job.id)[-1].autopsy
        assert autopsy is not None
        assert autopsy.signals[0] == "stack noted"
        assert "in hang_async" in autopsy.stack
    end.touch()
    assert sibling.result(timeout=30) == "ended well"
    assert len(fleet.ledger.jobs.attempts(sibling.id)) == 1


SIGNS = "import gc; signs = next(one for one in gc.get_objects() if type(one).__name__ == 'JobSignals').fileno()\n"


@pytest.fixture
def home(tmp_path: Path) -> Iterator[RunnerPoolHarness]:
    with house(tmp_path, pulse_interval_s=0.1) as built:
        yield built


@pytest.fixture
def runner(home: RunnerPoolHarness) -> RunnerProcess:
    opened = home.bench.start_runner(0, "sync")
    home.born(opened)
    return opened


def hear(runner: RunnerProcess) -> bool:
    """Take what the pulse says; True when it has answered the last question."""
    select.select([runner.signals], [], [], 0.01)
    for sign in runner.read_signals():
        if sign.noted:
            runner.stacks.heard(sign.token)
    return runner.stacks.told


def asked(runner: RunnerProcess) -> str:
    runner.stacks.forget()
    assert runner.stacks.ask()
    wait_for(lambda: hear(runner), "an answer")
    return runner.stacks.text()


def test_a_runner_is_asked_without_a_signal(home: RunnerPoolHarness, runner: RunnerProcess, tmp_path: Path) -> None:
    # A signal would end the wait in C, and what it returns would be seen.
    code = "left = ctypes.CDLL(None).poll(None, 0, 3000); assert left == 0, left"
    runner.send([frame(1, "evaluate", f"Path({str(tmp_path / 'in')!r}).touch(); {code}")])
    wait_for((tmp_path / "in").exists, "the job is entered")
    wait_for(lambda: "in evaluate" in asked(runner), "the stack of the job")
    assert "unstuck/runner" not in runner.stacks.text()
    assert home.finish(runner)[0].outcome == Succeeded(b"null")


def test_an_answer_that_nobody_waits_for_is_not_told_with_a_later_death(
    home: RunnerPoolHarness, runner: RunnerProcess
) -> None:
    runner.stacks.ask()
    runner.stacks.forget()
    wait_for(lambda: hear(runner), "an answer")
    runner.send([frame(1, "segfault")])
    home.exit_of(runner)
    assert runner.stacks.text().startswith("Fatal Python error: Segmentation fault")


def test_a_runner_that_forked_answers_itself(home: RunnerPoolHarness, runner: RunnerProcess, tmp_path: Path) -> None:
    fork = f"child = os.fork() or (Path({str(tmp_path / 'child')!r}).touch(), time.sleep(600))"
    wait = f"while not os.path.exists({str(tmp_path / 'end')!r}): time.sleep(0.001)"
    runner.send([frame(1, "evaluate", f"{fork}\n{wait}\nos.kill(child, 9); os.waitpid(child, 0)")])
    wait_for((tmp_path / "child").exists, "the child")
    for _ in range(20):
        assert "in evaluate" in asked(runner)
    (tmp_path / "end").touch()
    assert home.finish(runner)[0].outcome == Succeeded(b"null")


def test_where_a_job_closed_what_it_is_asked_by_there_is_still_the_signal(
    home: RunnerPoolHarness, runner: RunnerProcess, tmp_path: Path
) -> None:
    wait = f"while not os.path.exists({str(tmp_path / 'end')!r}): time.sleep(0.001)"
    runner.send([frame(1, "evaluate", f"{SIGNS}os.close(signs)\n{wait}")])
    wait_for(lambda: not runner.stacks.ask(), "nobody to listen")
    assert runner.dump_stack()
    wait_for(lambda: "in evaluate" in runner.stacks.text(), "the stack")
    (tmp_path / "end").touch()
    assert home.finish(runner)[0].outcome == Succeeded(b"null")


def test_a_socket_of_the_job_with_the_number_of_ours_is_left_alone(
    home: RunnerPoolHarness, runner: RunnerProcess, tmp_path: Path
) -> None:
    mine = "import socket; a, b = socket.socketpair(); os.dup2(a.fileno(), signs)\nb.send(b'12345678')\n"
    wait = f"while not os.path.exists({str(tmp_path / 'end')!r}): time.sleep(0.001)\n"
    begin = f"{SIGNS}{mine}Path({str(tmp_path / 'in')!r}).touch()\n{wait}"
    runner.send([frame(1, "evaluate", f"{begin}a.setblocking(False); assert a.recv(100) == b'12345678'")])
    wait_for((tmp_path / "in").exists, "the job is entered")
    after_s = home.trace.last_pulse_s(0) + 0.3
    wait_for(lambda: home.trace.last_pulse_s(0) > after_s, "some pulses, of which each might have read it")
    (tmp_path / "end").touch()
    assert home.finish(runner)[0].outcome == Succeeded(b"null")


def test_a_job_that_reset_every_signal_is_asked_all_the_same(
    home: RunnerPoolHarness, runner: RunnerProcess, tmp_path: Path
) -> None:
    reset = "import faulthandler\nfor number in range(34, 65): signal.signal(number, signal.SIG_DFL)"
    wait = f"while not os.path.exists({str(tmp_path / 'end')!r}): time.sleep(0.001)"
    runner.send([frame(1, "evaluate", f"{reset}\n{wait}")])
    wait_for(lambda: "in evaluate" in asked(runner), "the stack")
    (tmp_path / "end").touch()
    assert home.finish(runner)[0].outcome == Succeeded(b"null")


def test_who_holds_the_interpreter_in_another_thread_is_seen_by_a_signal(
    home: RunnerPoolHarness, runner: RunnerProcess, tmp_path: Path
) -> None:
    # One call into C says that it has begun and stays there: between two of them others may run.
    define = f"def hold_it(): ctypes.PyDLL(None).system(b'touch {tmp_path / 'in'}; exec sleep 600')"
    runner.send([frame(1, "evaluate", f"{define}\nthreading.Thread(target=hold_it).start()\ntime.sleep(600)")])
    wait_for((tmp_path / "in").exists, "the thread")
    assert runner.stacks.ask()
    assert runner.dump_stack(silent=True)
    both = ("in hold_it", "in evaluate")
    wait_for(lambda: all(words in runner.stacks.text() for words in both), "the stacks of both threads")
    assert not hear(runner)
    runner.kill()
    assert home.exit_of(runner).signal == signal.SIGKILL
