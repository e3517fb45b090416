"""Replay idle workers with `pgbench`: real rows, real sessions and the statements of real workers at their times.

Each worker is a few Python processes, and a thousand of them do not fit beside their server on a small machine;
`pgbench` holds thousands of sessions for next to no CPU.
"""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import psutil
from tests.support.postgres import PgServer

from bench import tasks
from bench.fleet import Stage
from bench.idle_replay_scripts import LEAST_WORKERS, idle_scripts
from bench.processes import CpuClock, cpu_of_family, wait_for
from bench.recording import RecordingLedger
from bench.report import progress
from unstuck import config, host
from unstuck.config import DEFAULT_QUEUE, Settings
from unstuck.ledger.contract.workers import NewWorker
from unstuck.runner.tasks import Manifest, TaskEntry
from unstuck.worker.registration import new_worker_id, registration_of, self_description, with_clock

WORKERS_PER_HOST = LEAST_WORKERS
CLIENTS_PER_THREAD = 50
"""A thread looks at all its clients whenever one of them is due."""
BIRTHS_PER_S = 10.0
"""Each birth costs two sessions that compile their functions, and that is not what is measured."""
LEAST_SPREAD_S = 10.0
"""Nobody is in step with the others: all that they do is as spread as their births are."""
LEAST_MEMORY_BYTES = 3 << 30
LONGEST_S = 86_400


def pgbench_of(server: PgServer) -> Path | None:
    """Give the program, where it was installed with the server."""
    program = server.binaries / "pgbench"
    return program if program.exists() else None


class Clients:
    """Two `pgbench`: one is everybody's turns, the other everybody's service."""

    def __init__(self, processes: list[subprocess.Popen[bytes]], log: Path) -> None:
        self._processes = processes
        self._log = log

    def cpu(self) -> CpuClock:
        return sum((cpu_of_family(process.pid) for process in self._processes), CpuClock())

    def check(self) -> None:
        """Raise where a client has ended: it says why."""
        said = self._log.read_text(errors="replace")
        if "error" in said or any(process.poll() is not None for process in self._processes):
            raise RuntimeError(f"pgbench did not go on:\n{said[-2000:]}")


@contextmanager
def replayed(stage: Stage, server: PgServer, program: Path, workers: int) -> Iterator[Clients]:
    """Have so many idle workers on the stage's ledger, all born and all beating."""
    settings = config.load({"url": stage.url})
    defined = tasks.app.definition().tasks.values()
    found = (TaskEntry(task.name, task.queue, task.is_async, task.policy) for task in defined)
    manifest = Manifest(tuple(found), config.dump(settings), fork=True)
    apart_s = max(1 / BIRTHS_PER_S, LEAST_SPREAD_S / workers)
    with ExitStack() as stack, _recording(settings) as ledger:
        scripts = idle_scripts(
            ledger, _birth(settings, manifest, host.hostname()), manifest, settings, workers, apart_s
        )
        for number in range(workers):
            ledger.register(_birth(settings, manifest, f"host-{number // WORKERS_PER_HOST}"))
        log = stage.folder / "pgbench.log"
        started = []
        for purpose, script in (("turn", scripts.turn), ("service", scripts.service)):
            path = stage.folder / f"{purpose}.sql"
            path.write_text(script + "\n")
            started.append(stack.enter_context(_pgbench(program, stage.url, purpose, path, workers, log)))
        clients = Clients(started, log)
        _wait_for_births(ledger, clients, workers * apart_s)
        # Every beat has told its own session by now: ours, which gave birth to all, is not needed any more.
        ledger.close()
        yield clients


def _birth(settings: Settings, manifest: Manifest, hostname: str) -> NewWorker:
    about = {"hostname": hostname, "pid": os.getpid(), "fork": manifest.fork}
    born = registration_of(
        new_worker_id(),
        name=None,
        settings=settings,
        manifest=manifest,
        queues=(DEFAULT_QUEUE,),
        concurrency=settings.slots,
        metadata={**about, **self_description(settings, manifest, reaper=True)},
    )
    return with_clock(msgspec.structs.replace(born, host=hostname))


@contextmanager
def _recording(settings: Settings) -> Iterator[RecordingLedger]:
    ledger = RecordingLedger(settings)
    try:
        yield ledger
    finally:
        ledger.close()


@contextmanager
def _pgbench(
    program: Path, url: str, purpose: str, script: Path, clients: int, log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    threads = -(-clients // CLIENTS_PER_THREAD)
    # Extended: values travel apart from the statement, as the driver sends them.
    how = ["--no-vacuum", "--protocol=extended", f"--time={LONGEST_S}", f"--client={clients}", f"--jobs={threads}"]
    with log.open("ab") as file:
        process = subprocess.Popen(
            [program, *how, "--define=lap=0", "--define=begun=0", f"--file={script}", url],
            env={**os.environ, "PGAPPNAME": f"unstuck {purpose}"},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _wait_for_births(ledger: RecordingLedger, clients: Clients, spread_s: float) -> None:
    until_s = time.monotonic() + spread_s
    while (left_s := until_s - time.monotonic()) > 0:
        clients.check()
        if (free := psutil.virtual_memory().available) < LEAST_MEMORY_BYTES:
            raise RuntimeError(f"only {free >> 20:,} MB of memory are left, {left_s:.0f} s before all are born")
        progress(f"  {left_s:.0f} s until all are born, {free >> 20:,} MB free")
        time.sleep(min(left_s, 10.0))
    wait_for(lambda: ledger.fleet().late == 0, "everybody beats", every_s=0.5)
