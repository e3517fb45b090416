"""Run real workers for tests: start them, watch them, kill them, and look into the ledger meanwhile."""

import fcntl
import glob
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
from tests.support import processes
from tests.support.backdoor import Backdoor, backdoor_of
from tests.support.hosts import HERE, Host, Hub
from tests.support.postgres import PgServer, prepare_postgres
from tests.support.run_guard import note_memory_of
from tests.support.signals import OwnProcess, descendants

from unstuck import App
from unstuck.client.job import Job
from unstuck.config import RECOVERY_NAMES, Recovery
from unstuck.domain.states import FINAL_STATES, JobState, WorkerState
from unstuck.errors import LedgerUnavailable
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.workers import WorkerRecord

T = TypeVar("T")

TASKS = "tests.crash.apps.tasks:app"
ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 60.0
LOOK_S = 0.005
RARELY_S = 0.03
"""What does not come at once is looked for less often: a look costs, and whoever is waited for needs the processor."""
SLACKENING = 1.1


def wait_for(look: Callable[[], T], what: str, patience_s: float = TIMEOUT_S, every_s: float = LOOK_S) -> T:
    """Look until it is there (truthy), and give it; fail with a sentence when patience ends."""
    deadline_s = time.monotonic() + patience_s
    pause_s = every_s
    while True:
        seen = look()
        if seen:
            return seen
        if time.monotonic() > deadline_s:
            raise AssertionError(f"after {patience_s:.0f}s still not: {what}")
        time.sleep(pause_s)
        pause_s = min(pause_s * SLACKENING, max(every_s, RARELY_S))


class WorkerProcess:
    """One `unstuck worker` with everything below it."""

    def __init__(self, fleet: "Fleet", process: subprocess.Popen[bytes], log: Path) -> None:
        self.fleet = fleet
        self.process = process
        self.log = log

    @property
    def pid(self) -> int:
        return self.process.pid

    def record(self) -> WorkerRecord | None:
        found = [worker for worker in self.fleet.ledger.workers.list() if worker.pid == self.pid]
        return max(found, key=lambda worker: worker.created_at, default=None)

    @property
    def id(self) -> str:
        record = self.record()
        assert record is not None
        return record.id

    def family(self) -> list[OwnProcess]:
        """Return the worker, its fork server and its runners, eldest first; nothing if the worker has ended."""
        try:
            return [OwnProcess(self.pid), *descendants(self.pid)] if self.process.poll() is None else []
        except psutil.NoSuchProcess:
            return []

    def runners(self) -> list[OwnProcess]:
        """Grandchildren: whom the fork server forked."""
        return self.family()[2:]

    def signal_family(self, number: int) -> None:
        for process in self.family():
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                pass

    def freeze(self, *, alone: bool = False) -> None:
        """Stop the worker, with everything below it unless `alone`, at a moment when it does not write.

        A process that stops while it holds the write lock of SQLite is killed by those who wait for the lock."""
        wait_for(lambda: self._stopped_at_rest(alone), "a moment in which the worker does not write")

    def _stopped_at_rest(self, alone: bool) -> bool:
        self._signal(signal.SIGSTOP, alone)
        wait_for(lambda: OwnProcess(self.pid).status() == psutil.STATUS_STOPPED, "the worker to stand still")
        path = self.fleet.url.removeprefix("sqlite://")
        if path == self.fleet.url:
            return True
        with Path(path + "-lock").open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._signal(signal.SIGCONT, alone)
                return False
        return True

    def _signal(self, number: int, alone: bool) -> None:
        if alone:
            self.process.send_signal(number)
        else:
            self.signal_family(number)

    def kill(self) -> None:
        """kill -9 of the worker process alone; the kernel takes the rest."""
        self.process.kill()
        self.process.wait(10)

    def kill_family(self) -> None:
        self.signal_family(signal.SIGKILL)
        self.process.wait(10)

    def stop(self, patience_s: float = 30.0) -> int:
        """SIGTERM and wait for the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(patience_s)

    def said(self) -> str:
        return self.log.read_text(errors="replace")


def as_app_takes_them(settings: dict[str, Any]) -> dict[str, Any]:
    """Put those of recovery into one object."""
    recovery = {name: value for name, value in settings.items() if name in RECOVERY_NAMES}
    others = {name: value for name, value in settings.items() if name not in recovery}
    return {**others, "recovery": Recovery(**recovery)} if recovery else others


def copy_tasks(source: App, target: App) -> None:
    """Register the tasks of one app with another, which is on a ledger of its own."""
    for task in source._tasks.values():
        target._add(task.definition)


class Fleet:
    """A ledger, an app on it in this process, and any number of workers in others."""

    def __init__(self, url: str, folder: Path, **settings: Any) -> None:
        self.url = url
        self.folder = folder
        self.environment = {f"UNSTUCK_{name.upper()}": str(value) for name, value in settings.items()}
        self.workers: list[WorkerProcess] = []
        self._pages: set[Path] = set()
        """What its workers keep in memory: one that is killed leaves it behind."""
        self._numbers = itertools.count()
        self.app = self._app(as_app_takes_them(settings))
        self.ledger: Ledger = self.app.ledger

    def _app(self, settings: dict[str, Any]) -> App:
        # The same tasks as in the workers, on the same ledger, under this process's own App.
        from tests.crash.apps import tasks

        app = App(self.url, queues=["other"], **settings)
        copy_tasks(tasks.app, app)
        return app

    def task(self, name: str) -> Any:
        return self.app.task_by_name(name)

    def backdoor(self) -> Backdoor:
        """Return a way to change rows behind the ledger's back."""
        return backdoor_of(self.url)

    def surroundings(self) -> dict[str, str]:
        """The environment of a process that uses this ledger."""
        return {**os.environ, "UNSTUCK_URL": self.url, **self.environment}

    def start(
        self,
        *arguments: str,
        wait: bool = True,
        target: str | None = None,
        place: Host = HERE,
        prepare_fork_server: bool = True,
        **environment: str,
    ) -> WorkerProcess:
        log = self.folder / f"worker-{len(self.workers)}.log"
        with log.open("wb") as file:
            process = processes.start(
                "unstuck.cli.main",
                "worker",
                target or TASKS,
                *arguments,
                cwd=ROOT,
                env={**self.surroundings(), **environment},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                place=place,
                prepare_fork_server=prepare_fork_server,
            )
        worker = WorkerProcess(self, process, log)
        self.workers.append(worker)
        if wait:
            self.wait_active(worker)
        return worker

    def wait_active(self, worker: WorkerProcess) -> None:
        def active() -> bool:
            code = worker.process.poll()
            assert code is None, f"the worker exited with {code}:\n{worker.said()}"
            record = worker.record()
            return record is not None and record.state is WorkerState.ACTIVE

        wait_for(active, f"worker {worker.pid} active")
        self._pages |= note_memory_of(worker.pid)

    def state(self, job: Job) -> JobState:
        record = self.ledger.jobs.get(job.id)
        assert record is not None
        return record.state

    def wait_state(self, job: Job, *states: JobState, patience_s: float = TIMEOUT_S) -> float:
        """Wait until the job is in one of these states; give the monotonic time when it was seen."""
        wait_for(lambda: self.state(job) in states, f"job {job.id} {' or '.join(states)}", patience_s)
        return time.monotonic()

    def begin(self, task: str, seconds: float | str, queue: str = "default") -> tuple[Job, int]:
        """Enqueue a nap and wait until user code is really in it; give the job and the pid of its runner."""
        notes = self.folder / f"begun-{next(self._numbers)}"
        job = self.task(task).options(queue=queue).enqueue(seconds, str(notes))
        wait_for(lambda: notes.exists() and "\n" in notes.read_text(), f"job {job.id} ({task}) to begin")
        return job, int(notes.read_text().split()[1])

    def wait_running(self, job: Job) -> None:
        self.wait_state(job, JobState.RUNNING)

    def wait_final(self, job: Job, patience_s: float = TIMEOUT_S) -> float:
        return self.wait_state(job, *FINAL_STATES, patience_s=patience_s)

    def close(self) -> None:
        for worker in self.workers:
            self._pages |= note_memory_of(worker.pid) if worker.process.poll() is None else set()
            worker.signal_family(signal.SIGCONT)
            worker.signal_family(signal.SIGKILL)
            worker.process.wait(10)
        for page in self._pages:
            page.unlink(missing_ok=True)
        self.app.close()


FAKETIME = next(iter(glob.glob("/usr/lib/*/faketime/libfaketime.so.1")), "")
needs_faketime = pytest.mark.skipif(not FAKETIME, reason="libfaketime is not installed")

SCALED = {"heartbeat_interval": "0.5s", "heartbeat_timeout": "4s", "check_interval": "0.25s", "session_grace": "0.5s"}
"""The default settings, about eight times as fast."""
LEASE_S = 4.0
PROMPT = {"heartbeat_interval": "0.5s", "check_interval": "0.25s", "session_grace": "0.5s"}
"""Quick loops and the default lease: a worker that gets no processor for some seconds is not declared dead."""
QUICK_ANSWERS = {
    **PROMPT,
    "heartbeat_timeout": "4s",
    "claimed_stale_after": "60s",
    "running_stale_after": "60s",
}
"""Calls to the ledger that get no answer are given up soon, and still no worker is declared dead for its silence."""
SEEN_FIRST = {**PROMPT, "heartbeat_interval": "5s", "check_interval": "0.1s"}
"""After an outage a reaper looks at the workers before their next heartbeats come."""


class Clock:
    """The wall clock of processes that start with `environment`; clocks that only measure time go on as always."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._file.touch(0o644)
        self.step_to(0)
        self.environment = {
            "LD_PRELOAD": FAKETIME,
            "FAKETIME_TIMESTAMP_FILE": str(file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def step_to(self, off_s: float) -> None:
        """Let the clock differ by this much from the true time, from now on."""
        self.off_s = off_s
        new = self._file.with_suffix(".new")
        new.write_text(f"{off_s:+f}s\n")
        new.chmod(0o644)
        new.rename(self._file)


@contextmanager
def start_with_clock() -> Iterator[tuple[PgServer, Clock]]:
    """Run a server whose clock can be stepped."""
    with prepare_postgres() as server:
        clock = Clock(server.folder / "clock")
        server.environment = clock.environment
        server.start()
        yield server, clock


@contextmanager
def own_network() -> Iterator[Hub]:
    """Move this thread into a network of its own as long as the block lasts."""
    processes.start_server()  # Else it would be started in there, and stay.
    with Hub() as hub:
        yield hub


def the_dead(fleet: Fleet) -> list[str]:
    """Return each worker that was declared dead, with the verdict."""
    return [f"{one.name}: {one.verdict}" for one in fleet.ledger.workers.list() if one.state is WorkerState.DEAD]


def assert_no_worker_declared_dead(fleet: Fleet) -> None:
    dead = the_dead(fleet)
    assert not dead, f"declared dead although alive: {dead}"


def wait_heartbeats(fleet: Fleet, times: int = 2) -> None:
    """Wait until every worker has been heard this many times from now on, and check that none is declared dead."""
    ids = {worker.id for worker in fleet.workers}
    last: dict[str, float] = {}
    heard = dict.fromkeys(ids, -1)  # The first look finds what came before.

    def enough() -> bool:
        with suppress(LedgerUnavailable):
            for record in fleet.ledger.workers.list():
                if record.id in ids and record.last_seen_at != last.get(record.id):
                    assert record.state is not WorkerState.DEAD, f"declared dead although alive: {record}"
                    last[record.id] = record.last_seen_at
                    heard[record.id] += 1
        return min(heard.values()) >= times

    wait_for(enough, f"{times} heartbeats of every worker")


def assert_one_attempt_each(fleet: Fleet, jobs: list[Job], patience_s: float = 40.0) -> None:
    """Wait for the naps; check that each needed one attempt, and that nobody was declared dead meanwhile."""

    def all_ended() -> bool:
        # Whoever asks while the server is away gets no answer: it is asked again.
        with suppress(LedgerUnavailable):
            assert_no_worker_declared_dead(fleet)
            return all(fleet.state(job) in FINAL_STATES for job in jobs)
        return False

    wait_for(all_ended, "every nap to end", patience_s, every_s=0.05)
    for job in jobs:
        assert job.result(timeout=5) == "rested"
        assert len(fleet.ledger.jobs.attempts(job.id)) == 1, fleet.ledger.jobs.attempts(job.id)
    assert_no_worker_declared_dead(fleet)


def begin(fleet: Fleet, task: str, seconds: float, name: str) -> tuple[Job, Path]:
    """Enqueue a nap and wait until its code has begun; return the job and the file that it writes its notes to."""
    notes = fleet.folder / name
    job = fleet.task(task).enqueue(seconds, str(notes))
    wait_for(lambda: notes.exists() and "begun" in notes.read_text(), f"{task} to begin")
    return job, notes


def begin_on_each(fleet: Fleet, workers: list[WorkerProcess], task: str, seconds: float) -> tuple[list[Job], Path]:
    """Let every worker begin one nap; return the jobs and the file that all of them write their notes to."""
    notes = fleet.folder / f"{task}.notes"
    jobs = [fleet.task(task).enqueue(seconds, str(notes)) for _ in workers]
    wait_for(lambda: notes.exists() and notes.read_text().count("begun") == len(workers), "every nap to begin")
    holders = {fleet.ledger.jobs.attempts(job.id)[0].worker_id for job in jobs}
    assert len(holders) == len(workers), "one job each"
    return jobs, notes


def overlap_s(notes: Path) -> float:
    """Return for how long the first two attempts of `tick_once_then_quick` ran at the same time."""
    lines = [line.split() for line in notes.read_text().splitlines()]
    pids = list(dict.fromkeys(pid for _, pid, _ in lines))
    assert len(pids) >= 2, f"there was one attempt only: {lines[:1]}"
    last_of_first = max(float(at) for _, pid, at in lines if pid == pids[0])
    begin_of_second = min(float(at) for _, pid, at in lines if pid == pids[1])
    return last_of_first - begin_of_second
