"""Workers that are only rows, on a real ledger, and processes that do nothing but be killed."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.support.builders import birth
from tests.support.fleet import wait_for

from unstuck import host
from unstuck.config import Settings
from unstuck.domain.policy import Policy, encode_policy
from unstuck.domain.states import JobState
from unstuck.domain.watch_clock import Tick
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.jobs import NewJob, TaskRecord
from unstuck.ledger.contract.recovery import WorkerWatch
from unstuck.ledger.contract.workers import AttemptRef, ClaimRequest, Turn, WorkerRecord
from unstuck.ledger.open import ready_ledger
from unstuck.recovery.reap import Reaper

LONG_S = 600.0
VICTIMS = 500
PROCESSES = 20
Victim = subprocess.Popen[bytes]


class DummyProcess:
    """A process that does nothing, to be killed."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
        )
        self.pid = self.process.pid
        self.started = host.process_started(self.pid)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    @property
    def dead(self) -> bool:
        return self.process.poll() is not None


@dataclass
class StoredWorkers:
    ledger: Ledger
    bodies: list[DummyProcess] = field(default_factory=list)
    born: int = 0
    ticked_s: float = field(default_factory=host.boottime_s)

    def body(self) -> DummyProcess:
        self.bodies.append(DummyProcess())
        return self.bodies[-1]

    def worker(self, *, suspect_after_s: float = LONG_S, body: DummyProcess | None = None, **changes: Any) -> str:
        """Register a worker; without a body it lives on another host, where nobody can look."""
        self.born += 1
        facts: dict[str, Any] = {
            "name": f"name{self.born}",
            "host": host.hostname() if body else "elsewhere",
            "pid": body.pid if body else 1,
            "pid_namespace": host.pid_namespace() if body else "pid:[1]",
            "process_started": body.started if body else "1",
            "tasks": (TaskRecord("t", "default"),),
            "concurrency": 10,
            "version": "0",
            "heartbeat_interval_s": min(suspect_after_s / 4, 5.0),
            "suspect_after_s": suspect_after_s,
            "running_stale_after_s": suspect_after_s,
        }
        worker = birth(changes.pop("id", f"w{self.born}"), **{**facts, **changes})
        self.ledger.workers.register(worker)
        return worker.id

    def running(self, worker_id: str, count: int = 1, policy: Policy | None = None) -> list[int]:
        """Give the worker jobs, and have it start them."""
        claimed = self.claimed(worker_id, count, policy)
        tokens = {held.job_id: held.token for held in self.ledger.workers.held(worker_id)}
        self.ledger.workers.turn(Turn(worker_id, start=tuple(AttemptRef(job_id, tokens[job_id]) for job_id in claimed)))
        return claimed

    def claimed(self, worker_id: str, count: int = 1, policy: Policy | None = None) -> list[int]:
        policy = policy or Policy()
        new = NewJob(
            "t",
            "default",
            b"{}",
            policy=encode_policy(policy),
            on_crash=policy.on_crash,
            heartbeat=policy.heartbeat,
            heartbeat_timeout_s=policy.heartbeat_timeout_s,
            timeout_s=policy.timeout_s,
        )
        ids = [job.job_id for job in self.ledger.jobs.enqueue([new] * count)]
        answer = self.ledger.workers.turn(Turn(worker_id, claim_request=ClaimRequest(("default",), ("t",), count)))
        assert sorted(job.job_id for job in answer.claimed) == sorted(ids)
        return ids

    def silent(self, worker_id: str, for_s: float) -> None:
        """Keep watch until the ledger says that this worker has been silent for so long."""
        wait_for(
            lambda: self.keep_watch() or self.watch(worker_id).silent_s >= for_s, f"{worker_id} silent for {for_s}s"
        )

    def unwatched(self, worker_id: str, for_s: float) -> None:
        """Wait until nothing was heard of the worker for so long, while no one watches."""
        wait_for(lambda: self.watch(worker_id).since_beat_s >= for_s, f"{worker_id} not heard for {for_s}s")

    def keep_watch(self) -> None:
        """Reach the ledger as a reaper does that has been in touch since the stage was set."""
        now_s = host.boottime_s()
        self.ledger.recovery.tick(Tick(now_s - self.ticked_s, 0.01))
        self.ticked_s = now_s

    def watch(self, worker_id: str) -> WorkerWatch:
        return next(seen for seen in self.ledger.recovery.watch() if seen.id == worker_id)

    def record(self, worker_id: str) -> WorkerRecord:
        return next(seen for seen in self.ledger.workers.list() if seen.id == worker_id)

    def state(self, job_id: int) -> JobState:
        job = self.ledger.jobs.get(job_id)
        assert job is not None
        return job.state

    def cause(self, job_id: int) -> str:
        job = self.ledger.jobs.get(job_id)
        assert job is not None
        assert job.error is not None
        return job.error.cause or ""

    def messages(self, job_id: int) -> list[str]:
        return [event.message for event in self.ledger.events.list(job_id=job_id)]

    def reaper(self, recovery: Any) -> Reaper:
        return Reaper(self.ledger, recovery, by="test")


@contextmanager
def a_stage(url: str) -> Iterator[StoredWorkers]:
    ledger = ready_ledger(Settings(url=url))
    stage = StoredWorkers(ledger)
    stage.keep_watch()
    try:
        yield stage
    finally:
        for body in stage.bodies:
            body.kill()
        ledger.close()


@contextmanager
def registered_victims(ledger: Ledger) -> Iterator[list[Victim]]:
    """Register `VICTIMS` workers that are `PROCESSES` processes. Yield these, and kill them at the end."""
    processes = [subprocess.Popen(["sleep", "600"]) for _ in range(PROCESSES)]
    try:
        started = [host.process_started(process.pid) for process in processes]
        for number in range(VICTIMS):
            process = processes[number % PROCESSES]
            facts = {"pid": process.pid, "process_started": started[number % PROCESSES], "suspect_after_s": 600.0}
            ledger.workers.register(birth(f"victim-{number:03}", heartbeat_interval_s=5.0, **facts))
        yield processes
    finally:
        kill_all(processes)


def kill_all(victims: list[Victim]) -> None:
    for victim in victims:
        victim.kill()
    for victim in victims:
        victim.wait()
