"""Drive a real bench from a test: a real fork server, real runners, no ledger."""

import json
import os
import select
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from tests.support.fleet import wait_for

from unstuck.runner.messages import JobMessage, Kind
from unstuck.runner.status_page import StatusPage
from unstuck.runner.tasks import Manifest
from unstuck.worker.fork_client import ForkServerClient, RunnerBorn, RunnerExit
from unstuck.worker.runner_process import Finished, RunnerProcess

T = TypeVar("T")
PATIENCE_S = 20.0

APP = '''
import asyncio, ctypes, os, signal, subprocess, sys, threading, time
from pathlib import Path
from unstuck import App, Context
from unstuck.runner.context import current_context

app = App("sqlite:///never-opened.db")

def daemon(file):
    """Fork twice and leave the session, as daemons do."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        if os.fork() == 0:
            Path(file + ".new").write_text(str(os.getpid()))
            os.rename(file + ".new", file)
            time.sleep(600)
        os._exit(0)
    os.waitpid(pid, 0)
    while not os.path.exists(file):
        time.sleep(0.001)

@app.task
def add(a, b): return a + b

@app.task
def pid(): return os.getpid()

@app.task
def say(out, err=""):
    print(out, end="")
    print(err, end="", file=sys.stderr)

@app.task
def about(before, ctx: Context, after=None):
    assert current_context() == ctx
    return [before, after, ctx.job_id, ctx.task, ctx.queue, ctx.attempt, ctx.crash_count, ctx.worker_id]

@app.task
def wait_for(file):
    Path(file + ".entered").touch()
    while not os.path.exists(file):
        time.sleep(0.001)

@app.task
def leave_daemon(file, then=""):
    daemon(file)
    print("left", flush=True)
    if then == "wait":
        Path(file + ".entered").touch()
        time.sleep(600)
    if then:
        os._exit(int(then))

@app.task
def leave_child(command):
    return subprocess.Popen(command).pid

@app.task
def evaluate(text):
    exec(text, globals())

@app.task
def result_of(text): return eval(text)

@app.task
def die(code): os._exit(code)

@app.task
def segfault():
    print("before the fall")
    ctypes.string_at(0)

@app.task
def hold_the_gil(seconds, file):
    Path(file).touch()
    ctypes.PyDLL(None).sleep(seconds)

@app.task
def hold_the_gil_until_opened(pipe, file):
    Path(file).touch()
    while ctypes.PyDLL(None).open(pipe.encode(), os.O_RDONLY) < 0: pass

@app.task
def flood(megabytes, file):
    os.write(1, b"first words\\n")
    for _ in range(megabytes):
        os.write(1, b"x" * 1023 * 1024 + b"\\n")
    Path(file + ".entered").touch()
    while not os.path.exists(file):
        time.sleep(0.001)
    os.write(1, b"last words\\n")

@app.task
async def asay(text, seconds=0.0):
    print(text)
    await asyncio.sleep(seconds)
    print(text, file=sys.stderr)
    return [text, current_context().job_id]

@app.task
async def aevaluate(text):
    exec(text, globals())

@app.task
async def acancel_self():
    raise asyncio.CancelledError()

@app.task
async def astray():
    async def stray(): raise SystemExit(5)
    globals()["kept"] = asyncio.get_running_loop().create_task(stray())
    await asyncio.sleep(0.01)
    return "alive"
'''


def read_pid(file: Path) -> int:
    return int(wait_for(lambda: file.read_text() if file.exists() else "", f"a pid in {file.name}"))


GONE_S = 60.0


def gone_within(pid: int, seconds: float = GONE_S) -> bool:
    """Wait until a process is gone (a zombie counts as gone); False when it outlives the time, which bounds a hang."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], seconds)[0])
    finally:
        os.close(fd)


def frame(token: int, task: str, *args: Any, **kwargs: Any) -> JobMessage:
    payload = json.dumps({"args": args, "kwargs": kwargs}).encode()
    return JobMessage(token, token + 1000, task, "default", payload, "json", 1, 0)


class RunnerPoolHarness:
    """A bench that is up, with its page, and a little loop to wait with."""

    def __init__(self, bench: ForkServerClient, trace: StatusPage, manifest: Manifest) -> None:
        self.bench = bench
        self.trace = trace
        self.manifest = manifest
        self.events: list[Any] = []
        self.opened: list[RunnerProcess] = []
        self._open_runner = bench.start_runner
        bench.start_runner = self._open  # type: ignore[method-assign]

    def _open(self, slot: int, kind: Kind) -> RunnerProcess:
        self.opened.append(self._open_runner(slot, kind))
        return self.opened[-1]

    def close(self) -> None:
        self.bench.close()
        for runner in self.opened:
            runner.close()

    def wait_event(self, kind: type[T], patience_s: float = PATIENCE_S) -> T:
        deadline = time.monotonic() + patience_s
        while True:
            for event in self.events:
                if isinstance(event, kind):
                    self.events.remove(event)
                    return event
            left_s = deadline - time.monotonic()
            assert left_s > 0, f"no {kind.__name__} within {patience_s:g}s; saw {self.events}"
            select.select([self.bench], [], [], left_s)
            self.events += self.bench.read()

    def born(self, runner: RunnerProcess) -> int:
        while runner.pid is None:
            self.wait_event(RunnerBorn)
        return runner.pid

    def finish(self, runner: RunnerProcess, count: int = 1, patience_s: float = PATIENCE_S) -> list[Finished]:
        """Wait for so many outcomes, writing and reading as a worker does."""
        deadline = time.monotonic() + patience_s
        finished: list[Finished] = []
        while len(finished) < count:
            left_s = deadline - time.monotonic()
            assert left_s > 0, f"{len(finished)} of {count} outcomes within {patience_s:g}s; {runner.peek_output()}"
            assert not runner.closed, f"the runner is gone: {runner.last_output()}"
            select.select([runner], [runner] if runner.wants_write() else [], [], left_s)
            runner.flush()
            finished += runner.read()
        return finished

    def run(self, runner: RunnerProcess, task: str, *args: Any, **kwargs: Any) -> Finished:
        runner.send([frame(1, task, *args, **kwargs)])
        return self.finish(runner)[0]

    def exit_of(self, runner: RunnerProcess) -> RunnerExit:
        while True:
            found = self.wait_event(RunnerExit)
            if found.runner_id == runner.runner_id:
                return found


@contextmanager
def house(folder: Path, *, source: str = APP, slots: int = 4, **settings: Any) -> Iterator[RunnerPoolHarness]:
    """Write the app into a folder, go there, and run a bench on it."""
    (folder / "bench_app.py").write_text(source)
    back = os.getcwd()
    os.chdir(folder)
    bench = ForkServerClient("bench_app:app", **settings)
    trace = StatusPage.create(folder / f"trace-{time.monotonic_ns()}", slots)
    try:
        built = RunnerPoolHarness(bench, trace, bench.start())
        bench.configure(trace, "w-test")
        try:
            yield built
        finally:
            built.close()
    finally:
        bench.close()
        trace.close()
        os.chdir(back)
