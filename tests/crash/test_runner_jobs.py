"""What jobs return, raise and print comes back whole, and nothing they do but dying ends their runner."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.fleet import wait_for
from tests.support.runner_pool import RunnerPoolHarness, frame, house

from unstuck import host
from unstuck.domain.endings import Cancelled, NotStorable, Raised, Succeeded
from unstuck.runner.messages import JobMessage
from unstuck.runner.monitor import MAX_INTERVAL_S
from unstuck.worker.runner_process import RunnerProcess


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunnerPoolHarness]:
    with house(tmp_path_factory.mktemp("jobs"), max_output_bytes=10_000, max_payload_bytes=2000) as built:
        yield built


@pytest.fixture(scope="module")
def runner(home: RunnerPoolHarness) -> RunnerProcess:
    return home.bench.start_runner(0, "sync")


@pytest.fixture(scope="module")
def loop(home: RunnerPoolHarness) -> RunnerProcess:
    return home.bench.start_runner(1, "async")


def raised(home: RunnerPoolHarness, runner: RunnerProcess, task: str, *args: object) -> Raised:
    outcome = home.run(runner, task, *args).outcome
    assert isinstance(outcome, Raised), outcome
    return outcome


def test_a_result_comes_back(home: RunnerPoolHarness, runner: RunnerProcess) -> None:
    assert home.run(runner, "add", 1, b=2).outcome == Succeeded(b"3")


def test_the_context_is_given_where_the_signature_asks_for_it(home: RunnerPoolHarness, runner: RunnerProcess) -> None:
    facts = b'1001,"about","default",1,0,"w-test"]'
    assert home.run(runner, "about", "x", "y").outcome == Succeeded(b'["x","y",' + facts)
    assert home.run(runner, "about", after="y", before="x").outcome == Succeeded(b'["x","y",' + facts)
    assert home.run(runner, "about", "x").outcome == Succeeded(b'["x",null,' + facts)


def test_the_context_is_gone_when_the_job_is(home: RunnerPoolHarness, runner: RunnerProcess) -> None:
    home.run(runner, "about", "x")
    assert home.run(runner, "evaluate", "import contextvars; seen = contextvars.ContextVar('v'); seen.set(1)")
    assert "LookupError" in raised(home, runner, "evaluate", "seen.get()").type


def test_output_is_kept_with_the_job_that_printed_it(home: RunnerPoolHarness, runner: RunnerProcess) -> None:
    runner.send([frame(1, "say", "one", "err one"), frame(2, "add", 1, 1), frame(3, "say", "thrée\n")])
    first, second, third = home.finish(runner, 3)
    assert (first.stdout, first.stderr) == (b"one", b"err one")
    assert (second.stdout, second.stderr) == (b"", b"")
    assert (third.stdout, third.stderr) == ("thrée\n".encode(), b"")


def test_output_of_children_and_of_c_code_is_kept_too(home: RunnerPoolHarness, runner: RunnerProcess) -> None:
    done = home.run(runner, "evaluate", "subprocess.run(['echo', 'from a child']); ctypes.CDLL(None).puts(b'from C')")
    assert done.stdout == b"from a child\nfrom C\n"


def test_much_output_is_cut_in_the_middle(home: RunnerPoolHarness, runner: RunnerProcess) -> None:
    done = home.run(runner, "evaluate", "print('begin' + 'x' * 100_000 + 'end')")
    assert len(done.stdout) < 10_100
    assert done.stdout.startswith(b"beginxxx")
    assert done.stdout.endswith(b"xend\n")
    assert b"90,009 bytes left out" in done.stdout


def test_a_job_that_truncates_its_stdout_loses_only_its_own_words(
    home: RunnerPoolHarness, runner: RunnerProcess
) -> None:
    home.run(runner, "say", "x" * 500)
    home.run(runner, "evaluate", "print('lost', flush=True); open('/dev/stdout', 'w').write('kept')")
    assert home.run(runner, "say", "next").stdout.endswith(b"next")


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("raise ValueError('bad')", "ValueError", "bad"),
        ("sys.exit(3)", "SystemExit", "3"),
        ("raise KeyboardInterrupt('x')", "KeyboardInterrupt", "x"),
        ("raise GeneratorExit('x')", "GeneratorExit", "x"),
        ("raise BaseException('base')", "BaseException", "base"),
        ("raise ValueError('\\ud800 \\0')", "ValueError", "\\ud800 \\x00"),
        ("def f(): f()\nf()", "RecursionError", "maximum recursion depth"),
        ("class E(Exception):\n def __str__(self): sys.exit()\nraise E", "E", "cannot be written: SystemExit"),
        ("raise ValueError('y' * 10**7)", "ValueError", "characters left out"),
        ("signal.alarm(1); signal.signal(signal.SIGALRM, lambda *_: 1/0); time.sleep(9)", "ZeroDivisionError", "div"),
    ],
)
def test_whatever_a_job_raises_is_told_and_the_runner_lives(
    home: RunnerPoolHarness, runner: RunnerProcess, text: str, kind: str, message: str
) -> None:
    before = home.run(runner, "pid").outcome
    outcome = raised(home, runner, "evaluate", text)
    assert outcome.type.endswith(kind)
    assert message in outcome.message
    assert len(outcome.message) < 11_000
    assert home.run(runner, "pid").outcome == before


def test_a_traceback_shows_user_code_and_none_of_ours(home: RunnerPoolHarness, runner: RunnerProcess) -> None:
    outcome = raised(home, runner, "evaluate", "1/0")
    assert outcome.traceback.startswith("Traceback (most recent call last):\n")
    assert "bench_app.py" in outcome.traceback
    assert outcome.traceback.endswith("ZeroDivisionError: division by zero")
    assert "sync_loop" not in outcome.traceback


def test_arguments_that_do_not_fit_are_the_jobs_error(home: RunnerPoolHarness, runner: RunnerProcess) -> None:
    outcome = raised(home, runner, "add", 1)
    assert (outcome.type, outcome.message) == ("TypeError", "add() missing 1 required positional argument: 'b'")


def test_an_unknown_task_says_so(home: RunnerPoolHarness, runner: RunnerProcess) -> None:
    assert "no task 'adds'. Did you mean 'add'?" in raised(home, runner, "adds").message


@pytest.mark.parametrize(
    ("payload", "kind"), [(b"{", "json"), (b"[]", "json"), (b'{"args": 3}', "json"), (b"\xff", "json"), (b"", "cbor")]
)
def test_a_payload_that_cannot_be_read_says_so(
    home: RunnerPoolHarness, runner: RunnerProcess, payload: bytes, kind: str
) -> None:
    runner.send([JobMessage(9, 77, "add", "default", payload, kind, 1, 0)])
    outcome = home.finish(runner)[0].outcome
    assert isinstance(outcome, Raised)
    assert "arguments of job 77" in outcome.message
    assert "nqueue" in outcome.message


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("float('nan')", "NaN"),
        ("object()", "cannot be written as JSON"),
        ("'x' * 3000", "over the limit of 2,000"),
        ("'\\ud800'", "lone surrogate"),
        ("type('D', (dict,), {'items': lambda self: sys.exit(4)})(a=1)", "SystemExit"),
    ],
)
def test_a_result_that_cannot_be_stored_fails_alone(
    home: RunnerPoolHarness, runner: RunnerProcess, text: str, reason: str
) -> None:
    outcome = home.run(runner, "result_of", text).outcome
    assert isinstance(outcome, NotStorable)
    assert reason in outcome.reason
    assert home.run(runner, "add", 1, 1).outcome == Succeeded(b"2")


def test_a_fork_that_comes_back_out_of_the_job_reports_nothing(home: RunnerPoolHarness, runner: RunnerProcess) -> None:
    assert home.run(runner, "evaluate", "os.fork()").outcome == Succeeded(b"null")
    runner.send([frame(5, "add", 1, 1)])
    assert [done.token for done in home.finish(runner)] == [5]


def test_stdin_is_empty_and_stdout_may_be_closed(home: RunnerPoolHarness, runner: RunnerProcess) -> None:
    assert home.run(runner, "result_of", "sys.stdin.read()").outcome == Succeeded(b'""')
    home.run(runner, "evaluate", "os.close(1); os.dup2(os.open('/dev/null', os.O_WRONLY), 2)")
    # The next one prints as ever, and into nobody's file.
    said = home.run(runner, "say", "one", "err one")
    assert (said.outcome, said.stdout, said.stderr) == (Succeeded(b"null"), b"one", b"err one")


@pytest.mark.parametrize("timer", ["ITIMER_REAL", "ITIMER_VIRTUAL", "ITIMER_PROF"])
def test_an_alarm_that_a_job_left_armed_does_not_hit_the_next_one(
    home: RunnerPoolHarness, runner: RunnerProcess, timer: str
) -> None:
    home.run(runner, "evaluate", f"import signal; signal.setitimer(signal.{timer}, 0.05)")
    busy = "import time; end = time.process_time() + 0.2\nwhile time.process_time() < end: pass"
    assert home.run(runner, "evaluate", busy).outcome == Succeeded(b"null")


def test_a_job_that_wants_its_stacks_elsewhere_does_not_take_those_of_the_next_one(home: RunnerPoolHarness) -> None:
    runner = home.bench.start_runner(3, "sync")
    home.run(runner, "evaluate", "import faulthandler; faulthandler.enable()")
    since_s = host.boottime_s() + 1.5 * MAX_INTERVAL_S
    wait_for(lambda: home.trace.last_pulse_s(3) > since_s, "a pulse, and one before it")
    runner.send([frame(1, "segfault")])
    home.exit_of(runner)
    assert "in segfault" in runner.stacks.text()
    runner.close()


def test_each_runner_has_randomness_of_its_own(home: RunnerPoolHarness) -> None:
    seen = set()
    for slot in (2, 3):
        runner = home.bench.start_runner(slot, "sync")
        seen.add(home.run(runner, "result_of", "__import__('random').random()").outcome.result)  # type: ignore[union-attr]
        runner.retire()
        assert home.exit_of(runner).exit_code == 0
        runner.close()
    assert len(seen) == 2


# Async ----------------------------------------------------------------------------------------


def test_async_jobs_run_at_once_and_keep_their_words_apart(home: RunnerPoolHarness, loop: RunnerProcess) -> None:
    loop.send([frame(token, "asay", f"job {token}", 0.05) for token in range(1, 101)])
    finished = home.finish(loop, 100)
    assert {done.token for done in finished} == set(range(1, 101))
    for done in finished:
        assert done.outcome == Succeeded(f'["job {done.token}",{done.token + 1000}]'.encode())
        assert done.stdout == done.stderr == f"job {done.token}\n".encode()


def test_cancelling_an_async_job_ends_that_one(home: RunnerPoolHarness, loop: RunnerProcess) -> None:
    loop.send([frame(1, "asay", "long", 600), frame(2, "asay", "short", 0.05)])
    loop.cancel(1)
    first, second = home.finish(loop, 2)
    assert isinstance(first.outcome, Cancelled)
    assert first.stdout == b"long\n"
    assert isinstance(second.outcome, Succeeded)
    loop.cancel(99)


@pytest.mark.parametrize("text", ["1/0", "sys.exit(3)", "raise KeyboardInterrupt"])
def test_what_an_async_job_raises_is_its_own(home: RunnerPoolHarness, loop: RunnerProcess, text: str) -> None:
    loop.send([frame(1, "asay", "sibling", 0.05), frame(2, "aevaluate", text)])
    first, second = home.finish(loop, 2)
    assert (first.token, second.token) == (2, 1)
    assert isinstance(first.outcome, Raised)
    assert "async_loop" not in first.outcome.traceback
    assert isinstance(second.outcome, Succeeded)


def test_a_job_that_cancels_itself_is_not_cancelled_by_request(home: RunnerPoolHarness, loop: RunnerProcess) -> None:
    assert raised(home, loop, "acancel_self").type.endswith("CancelledError")


def test_a_stray_task_that_exits_does_not_end_the_loop(home: RunnerPoolHarness, loop: RunnerProcess) -> None:
    assert home.run(loop, "astray").outcome == Succeeded(b'"alive"')
    assert home.run(loop, "asay", "still here").stdout == b"still here\n"
    assert b"A stray task raised" in loop.peek_output()[1]


def test_much_async_output_is_cut_in_the_middle(home: RunnerPoolHarness, loop: RunnerProcess) -> None:
    done = home.run(loop, "aevaluate", "for n in range(100_000): print('line', n)")
    assert len(done.stdout) < 10_100
    assert done.stdout.startswith(b"line 0\n")
    assert done.stdout.endswith(b"line 99999\n")
    assert b"bytes left out" in done.stdout


def test_a_task_of_the_wrong_colour_is_refused(
    home: RunnerPoolHarness, loop: RunnerProcess, runner: RunnerProcess
) -> None:
    assert "is sync and came to a runner for async" in raised(home, loop, "add", 1, 2).message
    assert "is async and came to a runner for sync" in raised(home, runner, "asay", "x").message


def test_retired_runners_do_what_they_were_given_and_exit_zero(home: RunnerPoolHarness, tmp_path: Path) -> None:
    sync, loop = home.bench.start_runner(2, "sync"), home.bench.start_runner(3, "async")
    sync.send([frame(token, "add", 1, 1) for token in range(1, 6)])
    loop.send([frame(token, "asay", "x", 0.02) for token in range(1, 6)])
    for runner in (sync, loop):
        runner.retire()
        found = home.exit_of(runner)
        assert (found.cause, found.exit_code, found.signal) == ("exited with code 0", 0, None)
        assert found.max_rss_bytes > 1_000_000
        # Everything that it finished before it died can still be read.
        assert len(runner.read()) == 5
        assert runner.closed
        runner.close()


def test_descriptors_do_not_pile_up(home: RunnerPoolHarness) -> None:
    def one_life() -> None:
        runner = home.bench.start_runner(2, "sync")
        home.run(runner, "add", 1, 1)
        runner.kill()
        home.exit_of(runner)
        runner.close()

    one_life()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        one_life()
    wait_for(lambda: len(os.listdir("/proc/self/fd")) <= before, "as many descriptors as before")


SURROUNDINGS = (
    "[os.getcwd(), hash(str(sorted(os.environ.items()))), os.environ.get('PATH') == os.getenv('PATH'), time.tzname, "
    "(lambda before: [os.umask(before), before])(os.umask(0o22))[1], "
    "hash(str([signal.getsignal(one) for one in sorted(signal.valid_signals())])), "
    "sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))]"
)
CHANGES = {
    "the working directory": "os.chdir('/')",
    "a directory that is gone": "os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')",
    "a new variable": "os.environ['NEW_VARIABLE'] = 'x'",
    "a changed variable": "os.environ['PATH'] = '/nowhere'",
    "no variables at all": "os.environ.clear()",
    "another environ": "os.environ['A'] = 'b'; os.environ = {'only': 'this'}",
    "the time zone": "os.environ['TZ'] = 'Asia/Tokyo'; time.tzset()",
    "the umask": "os.umask(0)",
    "a signal handler": "signal.signal(signal.SIGUSR2, lambda *_: 1 / 0)",
    "an ignored signal": "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
    "a blocked signal": "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})",
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_job_finds_its_process_as_the_one_before_found_it(
    home: RunnerPoolHarness, runner: RunnerProcess, change: str
) -> None:
    before = home.run(runner, "result_of", SURROUNDINGS).outcome
    assert isinstance(before, Succeeded)
    changed = home.run(runner, "evaluate", change)
    assert changed.outcome == Succeeded(b"null")
    assert home.run(runner, "result_of", SURROUNDINGS).outcome == before
    # A failure is an end like any other.
    home.run(runner, "evaluate", f"{change}; 1 / 0")
    assert home.run(runner, "result_of", SURROUNDINGS).outcome == before


def test_an_async_job_that_finds_the_runner_idle_finds_it_as_the_first_did(
    home: RunnerPoolHarness, loop: RunnerProcess
) -> None:
    note = "globals().__setitem__('seen', " + SURROUNDINGS + ")"
    home.run(loop, "aevaluate", note.replace("'seen'", "'first'"))
    for change in CHANGES.values():
        home.run(loop, "aevaluate", change)
        home.run(loop, "aevaluate", note)
        assert home.run(loop, "aevaluate", "assert seen == first, (seen, first)").outcome == Succeeded(b"null"), change


def test_a_job_that_changed_its_process_is_told_so_once(home: RunnerPoolHarness) -> None:
    runner = home.bench.start_runner(2, "sync")
    said = home.run(runner, "evaluate", "os.chdir('/'); os.environ['SECRET_NAME'] = 'value'").stderr
    assert b"this job changed the working directory and environment variables (SECRET_NAME)" in said
    assert b"value" not in said.replace(b"variables", b"")
    assert home.run(runner, "evaluate", "os.chdir('/')").stderr == b""
    assert b"the umask" in home.run(runner, "evaluate", "os.umask(0)").stderr


def test_a_job_that_leaves_what_cannot_be_put_back_is_reported_and_its_runner_replaced(home: RunnerPoolHarness) -> None:
    runner = home.bench.start_runner(2, "sync")
    strange = (
        "class Strange:\n    def __call__(self, *_): pass\n    def __eq__(self, other): raise OSError('no')\n"
        "    __hash__ = None\nsignal.signal(signal.SIGUSR2, Strange())"
    )
    done = home.run(runner, "evaluate", strange)
    assert done.outcome == Succeeded(b"null")
    assert b"The runner is replaced: not all can be restored." in done.stderr
    assert home.exit_of(runner).exit_code == 0


def test_a_spawned_runner_starts_in_the_directory_of_its_worker(tmp_path: Path) -> None:
    # The import goes elsewhere, and leaves a thread: so runners are spawned, and import once more.
    source = (
        "import os, threading, time\nfrom unstuck import App\nos.makedirs('data', exist_ok=True)\nos.chdir('data')\n"
        "app = App('sqlite:///jobs.db')\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
        "@app.task\ndef where(): return [os.getcwd(), app.settings.url]\n"
    )
    with house(tmp_path, source=source) as built:
        assert not built.manifest.fork
        runner = built.bench.start_runner(0, "sync")
        expected = f'["{tmp_path}/data","sqlite:///{tmp_path}/data/jobs.db"]'
        assert built.run(runner, "where").outcome == Succeeded(expected.encode())
