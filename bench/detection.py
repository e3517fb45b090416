"""Measure detection: from just before `kill -9` until the job is settled in the ledger."""

import contextlib
import json
import signal
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from tests.support.signals import send_signal

from bench.databases import Database, Postgres
from bench.fleet import Stage, stage_on
from bench.processes import WorkerProcess, wait_for
from bench.report import Table
from unstuck.client.job import Job

LEASE: dict[str, Any] = {
    "heartbeat_interval": "500ms",
    "heartbeat_timeout": "2s",
    "check_interval": "250ms",
    "evidence": [],
}
BLINDED: dict[str, Any] = {"evidence": ["session"]}

Kill = Callable[[Stage, int], None]


def run(databases: list[Database], kills: int) -> Table:
    table = Table("detection", "Detection: kill -9 → job settled, milliseconds", ("median", "worst", "seen by"))
    for database in databases:
        _cases(table, database, "runner", _kill_runner, {}, 1, kills)
        _cases(table, database, "worker and runners, a neighbour lives", _kill_worker, {}, 2, kills)
        if isinstance(database, Postgres):
            label = "worker and runners, neighbours blinded (session)"
            _cases(table, database, label, _kill_worker, BLINDED, 2, kills)
        label = f"worker and runners, lease alone (timeout {LEASE['heartbeat_timeout']})"
        _cases(table, database, label, _kill_worker, LEASE, 2, kills)
    table.notes += [
        f"{kills} kills each; default settings but for what is in brackets",
        "session: as if on another host, with a grace of 2 s",
        f"lease: interval {LEASE['heartbeat_interval']}, timeout {LEASE['heartbeat_timeout']}, checked every "
        f"{LEASE['check_interval']}; with the default timeout add 28 s",
    ]
    return table


def _cases(
    table: Table, database: Database, label: str, kill: Kill, recovery: dict[str, Any], workers: int, kills: int
) -> None:
    environment = {"BENCH_RECOVERY": json.dumps(recovery)} if recovery else {}
    taken_ms: list[float] = []
    detectors: set[str] = set()
    with stage_on(database) as stage:
        stage.workers.start(workers, "--concurrency", "2", **environment)
        for number in range(kills):
            note = stage.folder / f"hold-{number}"
            job = stage.task("hold").enqueue(str(note))
            pid = int(wait_for(partial(_read, note), "job running"))
            begun_s = time.monotonic()
            kill(stage, pid)
            _wait_settled(stage, job)
            taken_ms.append((time.monotonic() - begun_s) * 1000)
            detectors |= _detectors(stage)
            missing = workers - sum(worker.process.poll() is None for worker in stage.workers.all)
            if missing:
                stage.workers.start(missing, "--concurrency", "2", **environment)
    seen_by = ", ".join(sorted(detectors)) or "kernel"
    table.add(f"{database.name}, {label}", statistics.median(taken_ms), max(taken_ms), seen_by)


def _read(note: Path) -> str:
    return note.read_text() if note.exists() else ""


def _kill_runner(_stage: Stage, pid: int) -> None:
    send_signal(pid, signal.SIGKILL)


def _kill_worker(stage: Stage, pid: int) -> None:
    owner = _owner(stage, pid)
    for member in owner.family():
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()


def _owner(stage: Stage, pid: int) -> WorkerProcess:
    return next(worker for worker in stage.workers.all if pid in {member.pid for member in worker.family()})


def _wait_settled(stage: Stage, job: Job) -> None:
    wait_for(lambda: stage.ledger.jobs.outcomes([job.id]), "job settled", every_s=0.001)
    with contextlib.suppress(ChildProcessError):
        for worker in stage.workers.all:
            worker.process.poll()


def _detectors(stage: Stage) -> set[str]:
    verdicts = [worker.verdict for worker in stage.ledger.workers.list() if worker.state == "dead"]
    return {str(verdict.detector) for verdict in verdicts if verdict is not None}
