"""Measure the channel between a worker and its runners: jobs per second, starts, deaths. No ledger takes part."""

import os
import select
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from bench.report import Table
from unstuck.runner.messages import JobMessage
from unstuck.runner.status_page import StatusPage
from unstuck.worker.fork_client import ForkServerClient, RunnerExit
from unstuck.worker.runner_process import RunnerProcess

APP = """
from unstuck import App
app = App("sqlite:///never-opened.db")

@app.task
def noop(): pass

@app.task
async def anoop(): pass
"""


def run(seconds_each: float, starts: int) -> Table:
    table = Table(
        "runner-wire", "Runner wire: a worker and its runners, no ledger", ("jobs/s", "median ms", "worst ms")
    )
    with _fork_server() as (server, import_ms):
        table.add("import of the app", None, import_ms, import_ms)
        started, died = _starts_and_deaths(server, starts)
        table.add("start of a runner → first outcome", None, statistics.median(started), max(started))
        table.add("SIGKILL → RunnerExit seen", None, statistics.median(died), max(died))
        sync = server.start_runner(0, "sync")
        loop = server.start_runner(1, "async")
        for ahead in (1, 16, 64):
            table.add(f"sync, {ahead} ahead", _throughput(sync, "noop", ahead, seconds_each), None, None)
        for ahead in (16, 200):
            table.add(f"async, {ahead} at once", _throughput(loop, "anoop", ahead, seconds_each), None, None)
    table.notes.append(f"{starts} starts and deaths")
    return table


@contextmanager
def _fork_server() -> Iterator[tuple[ForkServerClient, float]]:
    """Yield a fork server that has imported the app, and how long that took."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "wire_app.py").write_text(APP)
        os.chdir(folder)
        server = ForkServerClient("wire_app:app")
        try:
            import_ms = _timed_ms(server.start)
            with closing(StatusPage.create(Path(folder, "status"), 2)) as page:
                server.configure(page, "bench")
                yield server, import_ms
        finally:
            server.close()
            os.chdir(before)


def _jobs(start: int, count: int, task: str) -> list[JobMessage]:
    return [JobMessage(token, token, task, "default", b"{}", "json", 1, 0) for token in range(start, start + count)]


def _throughput(runner: RunnerProcess, task: str, ahead: int, seconds: float) -> float:
    """Keep `ahead` jobs with the runner and count what comes back."""
    sent = done = 0
    begun = time.perf_counter()
    until = begun + seconds
    poller = select.poll()
    while time.perf_counter() < until or done < sent:
        room = ahead - (sent - done) if time.perf_counter() < until else 0
        if room > 0:
            runner.send(_jobs(sent + 1, room, task))
            sent += room
        poller.register(runner, select.POLLIN | (select.POLLOUT if runner.wants_write() else 0))
        for _, event in poller.poll(1000):
            if event & select.POLLOUT:
                runner.flush()
            done += len(runner.read())
    return done / (time.perf_counter() - begun)


def _starts_and_deaths(server: ForkServerClient, count: int) -> tuple[list[float], list[float]]:
    started_ms, died_ms = [], []
    for _ in range(count):
        begun = time.perf_counter()
        runner = _first_outcome(server)
        started_ms.append((time.perf_counter() - begun) * 1000)
        server.read()
        runner.kill()
        died_ms.append(_timed_ms(lambda: _wait_for_exit(server)))
        runner.close()
    return started_ms, died_ms


def _first_outcome(server: ForkServerClient) -> RunnerProcess:
    runner = server.start_runner(0, "sync")
    runner.send(_jobs(1, 1, "noop"))
    while not runner.read():
        select.select([runner], [], [], 5)
    return runner


def _wait_for_exit(server: ForkServerClient) -> None:
    while True:
        select.select([server], [], [], 5)
        if any(isinstance(event, RunnerExit) for event in server.read()):
            return


def _timed_ms(act: Callable[[], object]) -> float:
    begun = time.perf_counter()
    act()
    return (time.perf_counter() - begun) * 1000
