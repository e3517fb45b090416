"""Run the real command line, and put a ledger into any situation without a worker of flesh and blood."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import processes
from tests.support.builders import birth

from unstuck import config
from unstuck.domain.endings import Ending, JobError
from unstuck.domain.liveness import Detector
from unstuck.domain.policy import Policy, encode_policy
from unstuck.domain.states import AttemptState, JobState, WorkerState
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.jobs import NewJob, TaskRecord
from unstuck.ledger.contract.recovery import GuardNone
from unstuck.ledger.contract.workers import AttemptRef, ClaimRequest, Output, Success, Turn, WorkerVerdict
from unstuck.ledger.open import ready_ledger

COMMAND = [sys.executable, "-m", "unstuck.cli.main"]
TIMEOUT_S = 300.0
"""Bounds a hang."""


@dataclass(frozen=True)
class CommandResult:
    """What a command printed, and how it ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.code == 0, self
        return json.loads(self.out)


class Cli:
    """A ledger, and the command line pointed at it."""

    def __init__(self, url: str, folder: Path, **settings: Any) -> None:
        self.url = url
        self.folder = folder
        self.settings = config.build({"url": url, **settings})

    def with_settings(self, **settings: Any) -> "Cli":
        """Return the same ledger with other settings for the workers that are registered here."""
        return Cli(self.url, self.folder, **settings)

    def environment(self, **more: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("UNSTUCK_")}
        return {**kept, "UNSTUCK_URL": self.url, "NO_COLOR": "1", **more}

    def run(self, *arguments: str, **environment: str) -> CommandResult:
        """Run a command to its end, in a process of its own."""
        done = processes.run(
            "unstuck.cli.main",
            *arguments,
            cwd=self.folder,
            env=self.environment(**environment),
            timeout=TIMEOUT_S,
            function="main",
        )
        said = CommandResult(done.returncode, done.stdout, done.stderr)
        assert "Traceback" not in said.err or "mend this first" in said.err, said.err
        return said

    def refused(self, code: int, *arguments: str, **environment: str) -> str:
        """Run a command that must end with this code and one sentence; give the sentence."""
        said = self.run(*arguments, **environment)
        assert said.code == code, said
        assert said.out == "", said
        lines = said.err.splitlines()
        assert len(lines) == 1, said
        assert lines[0].startswith("unstuck: "), said
        return lines[0]

    @contextmanager
    def ledger(self) -> Iterator[Ledger]:
        ledger = ready_ledger(self.settings)
        try:
            yield ledger
        finally:
            ledger.close()

    # Situations -------------------------------------------------------------------------------

    def worker(self, worker_id: str = "w1", name: str = "ada", *, queues: tuple[str, ...] = ("default",)) -> str:
        """Write down a worker that will never beat again by itself."""
        worker = birth(
            worker_id,
            name=name,
            queues=queues,
            tasks=(TaskRecord("add", "default"), TaskRecord("crawl", "scrapes", encode_policy(RETRIED))),
            version="0.1.0",
            heartbeat_interval_s=self.settings.recovery.heartbeat_interval_s,
            suspect_after_s=self.settings.recovery.claimed_stale_after_s,
            running_stale_after_s=self.settings.recovery.running_stale_after_s,
            metadata={"zone": "a"},
            rules=self.settings.recovery.rules,
        )
        with self.ledger() as ledger:
            ledger.workers.register(worker)
        return worker_id

    def jobs(self, count: int = 1, *, policy: Policy | None = None, **fields: Any) -> list[int]:
        rule = policy or Policy()
        new = NewJob(
            **{
                "task": "add",
                "queue": "default",
                "payload": b'{"args":[1,2]}',
                "policy": encode_policy(rule),
                "on_crash": rule.on_crash,
                **fields,
            }
        )
        with self.ledger() as ledger:
            return [stored.job_id for stored in ledger.jobs.enqueue([new] * count)]

    def claim(
        self, worker_id: str = "w1", limit: int = 1, *, start: bool = False, queue: str = "default"
    ) -> list[AttemptRef]:
        """Let the worker claim jobs, and start them."""
        with self.ledger() as ledger:
            wish = ClaimRequest(queues=(queue,), tasks=("add", "crawl"), limit=limit)
            answer = ledger.workers.turn(Turn(worker_id, claim_request=wish))
            held = [AttemptRef(claimed.job_id, claimed.token) for claimed in answer.claimed]
            assert len(held) == limit
            if start:
                assert not ledger.workers.turn(Turn(worker_id, start=tuple(held))).superseded
        return held

    def succeed(
        self, held: AttemptRef, result: bytes = b"3", stdout: bytes = b"", stderr: bytes = b"", *, worker_id: str = "w1"
    ) -> None:
        outputs = (Output(held.job_id, held.token, stdout, stderr),) if stdout or stderr else ()
        with self.ledger() as ledger:
            done = Turn(worker_id, done=(Success(held.job_id, held.token, result),), outputs=outputs)
            assert not ledger.workers.turn(done).superseded

    def fail(self, held: AttemptRef, message: str = "boom", *, worker_id: str = "w1") -> None:
        details = {"type": "ValueError", "traceback": f'  File "tasks.py", line 3\nValueError: {message}'}
        ending = Ending(
            held.job_id,
            held.token,
            JobState.FAILED,
            AttemptState.FAILED,
            error=JobError("TASK_FAILED", message, None, details),
            counter="failure",
            event="failed",
            message=f"TASK_FAILED: {message}",
        )
        with self.ledger() as ledger:
            assert not ledger.workers.turn(Turn(worker_id, endings=(ending,))).superseded

    def report_death(self, worker_id: str = "w1") -> None:
        with self.ledger() as ledger:
            verdict = WorkerVerdict(WorkerState.DEAD, Detector.PEER, "its process no longer exists", 1.5, "reaper")
            assert ledger.recovery.declare_dead(worker_id, verdict, GuardNone())


RETRIED = Policy(on_crash="retry")
