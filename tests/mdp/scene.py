"""A broker of ours as a process on a ledger, workers beside it, and what they wrote down."""

import queue
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cbor2
from tests import forked
from tests.fleet import PATIENCE_S, ROOT, Fleet, wait_for
from tests.mdp.wire import clear_away

from unstuck.config import Recovery
from unstuck.domain.liveness import Detector
from unstuck.domain.states import JobState
from unstuck.mdp import Client
from unstuck.reaper.sweep import Reaper
from unstuck.store.records import JobFilter, JobRecord, WorkerRecord

Process = subprocess.Popen[bytes]

BUSY_TIMEOUT = "20s"
"""Shorter than the default: nobody can tell whether an old worker ever got what a broker took for it before it died."""


@dataclass(frozen=True)
class Work:
    """One execution, as the worker wrote it down; without an end it was cut off."""

    name: str
    pid: int
    began: int
    ended: int | None


class Scene:
    """Starts whatever a test asks for; all of it ends with the test."""

    def __init__(self, url: str, folder: Path) -> None:
        self.folder = folder
        self.notes = folder / "notes"
        self.fleet = Fleet(url, folder)
        self.endpoint = "tcp://127.0.0.1:0"
        self._processes: list[Process] = []
        self._clients: list[Told] = []
        self.open()

    def open(self, **settings: object) -> None:
        """Start a broker; a second one comes where the first one was."""
        self.log = self.folder / f"broker-{len(self._processes)}.log"
        self._settings = {f"UNSTUCK_MDP_{name.upper()}": str(value) for name, value in settings.items()}
        with self.log.open("wb") as file:
            self.broker = self._start(
                "unstuck.cli.main", "broker", "--bind", self.endpoint, stdout=subprocess.PIPE, stderr=file
            )
        assert self.broker.stdout is not None
        said = self.broker.stdout.readline().decode().split()
        assert said[:1] == ["Serving"], (said, self.log.read_text())
        self.endpoint = said[1]

    def kill_broker(self) -> None:
        self.broker.kill()
        self.broker.wait()

    def worker(self, service: str = "echo", *more: str, ready: bool = True) -> Process:
        before = len(self.living(service))
        process = self._start("tests.mdp.noting", self.endpoint, service, str(self.notes), *more)
        if ready:
            wait_for(lambda: len(self.living(service)) > before, f"a worker for {service}")
        return process

    def plain_client(self, service: str, *body: str, timeout_s: float = PATIENCE_S) -> "subprocess.Popen[bytes]":
        return self._start(
            "tests.mdp.plain", "client", self.endpoint, service, *body, "--timeout", str(timeout_s), "--dealer",
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def client(self, **settings: Any) -> "Told":
        client = Told(self.endpoint, timeout=PATIENCE_S, log_errors=False, **settings)
        self._clients.append(client)
        return client

    def living(self, service: str) -> list[WorkerRecord]:
        return [worker for worker in self.fleet.ledger.workers(living_only=True) if service in worker.tasks]

    def declare_dead(self, worker: WorkerRecord) -> None:
        Reaper(self.fleet.ledger, Recovery(), by="test").bury(worker.id, Detector.OPERATOR, "somebody says so")

    def done(self) -> list[Work]:
        """Give what was done or begun, in the order of the beginnings."""
        begun: dict[tuple[str, int], int] = {}
        found: list[Work] = []
        for line in self.notes.read_text().splitlines() if self.notes.exists() else ():
            word, name, pid, at = line.split()
            if word == "begin":
                begun[name, int(pid)] = int(at)
            else:
                found.append(Work(name, int(pid), begun.pop((name, int(pid))), int(at)))
        found += [Work(name, pid, at, None) for (name, pid), at in begun.items()]
        return sorted(found, key=lambda work: work.began)

    def times(self) -> Counter[str]:
        return Counter(work.name for work in self.done())

    def wait_begun(self, name: str, times: int = 1) -> Work:
        """Wait until somebody is in the middle of it; give that execution."""
        wait_for(lambda: self.times()[name] >= times, f"{name} to begin the {times}. time")
        return [work for work in self.done() if work.name == name][-1]

    def jobs(self, *states: JobState) -> list[JobRecord]:
        return self.fleet.ledger.jobs(JobFilter(states=states, limit=5000))

    def job(self) -> JobRecord:
        """Give the only job that there is."""
        (found,) = self.jobs()
        record = self.fleet.ledger.job(found.id)
        assert record is not None
        return record

    def close(self) -> None:
        for client in self._clients:
            client.close()
        for process in reversed(self._processes):
            process.kill()
            process.communicate()
        clear_away(self.fleet.url)
        self.fleet.close()

    def _start(self, module: str, *words: str, **more: Any) -> Process:
        process: Process = forked.start(
            module,
            *words,
            cwd=ROOT,
            env={**self.fleet.surroundings(), "UNSTUCK_MDP_BUSY_TIMEOUT": BUSY_TIMEOUT, **self._settings},
            stdin=subprocess.DEVNULL,
            **more,
        )
        self._processes.append(process)
        return process


class Told(Client):
    """A client that keeps what it is told."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        self.news: queue.Queue[dict[str, Any]] = queue.Queue()
        super().__init__(*arguments, **settings)

    def handle_error_notification(self, error: dict[str, Any]) -> None:
        self.news.put(error)

    def next(self) -> dict[str, Any]:
        return self.news.get(timeout=PATIENCE_S)


def as_cbor(**values: Any) -> bytes:
    return cbor2.dumps(values)
