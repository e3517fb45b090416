"""Measure the road between a worker and its runners: jobs per second, births, deaths. No ledger involved.

Run it as `python bench/runner_wire.py [seconds per measurement]`.
"""

import os
import select
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

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
ROUNDS = 30


def jobs(start: int, count: int, task: str) -> list[JobMessage]:
    return [JobMessage(token, token, task, "default", b"{}", "json", 1, 0) for token in range(start, start + count)]


def throughput(runner: RunnerProcess, task: str, ahead: int, seconds: float) -> float:
    """Keep `ahead` jobs with the runner and count what comes back."""
    sent = done = 0
    begun = time.perf_counter()
    until = begun + seconds
    poller = select.poll()
    while time.perf_counter() < until or done < sent:
        room = ahead - (sent - done) if time.perf_counter() < until else 0
        if room > 0:
            runner.send(jobs(sent + 1, room, task))
            sent += room
        poller.register(runner, select.POLLIN | (select.POLLOUT if runner.wants_write() else 0))
        for _, event in poller.poll(1000):
            if event & select.POLLOUT:
                runner.flush()
            done += len(runner.read())
    return done / (time.perf_counter() - begun)


def until_exit(bench: ForkServerClient) -> None:
    while True:
        select.select([bench], [], [], 5)
        if any(isinstance(event, RunnerExit) for event in bench.read()):
            return


def first_outcome(bench: ForkServerClient) -> RunnerProcess:
    runner = bench.start_runner(0, "sync")
    runner.send(jobs(1, 1, "noop"))
    while not runner.read():
        select.select([runner], [], [], 5)
    return runner


def timed(act: Callable[[], object]) -> float:
    begun = time.perf_counter()
    act()
    return (time.perf_counter() - begun) * 1000


def births_and_deaths(bench: ForkServerClient) -> None:
    births, deaths = [], []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        runner = first_outcome(bench)
        births.append((time.perf_counter() - begun) * 1000)
        bench.read()
        runner.kill()
        deaths.append(timed(lambda: until_exit(bench)))
        runner.close()
    for name, values in (("open_runner → first outcome", births), ("SIGKILL → RunnerExit seen", deaths)):
        print(f"{name:32} median {statistics.median(values):6.2f} ms   worst {max(values):6.2f} ms")


def main(seconds: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "wire_app.py").write_text(APP)
        os.chdir(folder)
        bench = ForkServerClient("wire_app:app")
        print(f"{'import of the app':32} {timed(bench.start):13.0f} ms")
        trace = StatusPage.create(Path(folder, "trace"), 2)
        bench.configure(trace, "bench")
        try:
            births_and_deaths(bench)
            sync = bench.start_runner(0, "sync")
            loop = bench.start_runner(1, "async")
            for ahead in (1, 16, 64):
                print(f"{f'sync, {ahead} ahead':32} {throughput(sync, 'noop', ahead, seconds):10,.0f} jobs/s")
            for ahead in (16, 200):
                print(f"{f'async, {ahead} at once':32} {throughput(loop, 'anoop', ahead, seconds):10,.0f} jobs/s")
        finally:
            bench.close()


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 2.0)
