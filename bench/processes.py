"""Start real workers for benchmarks, end them, and read from the kernel what they cost."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil
from tests.support.signals import OwnProcess, descendants

from unstuck.domain.states import WorkerState
from unstuck.ledger.contract import Ledger

ROOT = Path(__file__).resolve().parent.parent
TASKS = "bench.tasks:app"
PATIENCE_S = 60.0
LOOK_S = 0.002
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_CPU_CLOCK = 2
"""CPUCLOCK_SCHED, as `clock_getcpuclockid` makes a clock of a process."""

T = TypeVar("T")


def wait_for(look: Callable[[], T], what: str, patience_s: float = PATIENCE_S, every_s: float = LOOK_S) -> T:
    deadline_s = time.monotonic() + patience_s
    while not (seen := look()):
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"after {patience_s:.0f}s still not: {what}")
        time.sleep(every_s)
    return seen


@dataclass(frozen=True)
class CpuClock:
    """CPU seconds, user and system together: of a first process, and of everybody below it."""

    head_s: float = 0.0
    below_s: float = 0.0

    def __sub__(self, other: "CpuClock") -> "CpuClock":
        return CpuClock(self.head_s - other.head_s, self.below_s - other.below_s)

    def __add__(self, other: "CpuClock") -> "CpuClock":
        return CpuClock(self.head_s + other.head_s, self.below_s + other.below_s)

    @property
    def all_s(self) -> float:
        return self.head_s + self.below_s


def cpu_of_family(pid: int) -> CpuClock:
    """Read the CPU time of a process and of its descendants, those it waited for included."""
    head_s, gone_s = _cpu_of(pid)
    below_s = gone_s
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in descendants(pid):
            below_s += sum(_cpu_of(child.pid))
    return CpuClock(head_s, below_s)


def _cpu_of(pid: int) -> tuple[float, float]:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        # The kernel's clock of another process: to the nanosecond, where /proc counts hundredths of a second.
        own_s = time.clock_gettime(~pid << 3 | _CPU_CLOCK)
    except OSError:
        return 0.0, 0.0
    fields = [int(field) for field in stat[stat.rindex(")") + 2 :].split()[13:15]]
    return own_s, sum(fields) / _TICKS_PER_S


class WorkerProcess:
    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log = log

    @property
    def pid(self) -> int:
        return self.process.pid

    def cpu(self) -> CpuClock:
        """Return the usage of the worker alone (head), and of fork server and runners (below)."""
        return cpu_of_family(self.pid)

    def family(self) -> list[OwnProcess]:
        """Return the worker, its fork server and its runners; nothing if the worker has ended."""
        try:
            return [OwnProcess(self.pid), *descendants(self.pid)] if self.process.poll() is None else []
        except psutil.NoSuchProcess:
            return []

    def signal_family(self, number: int) -> None:
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def kill_family(self) -> None:
        self.signal_family(signal.SIGKILL)
        self.process.wait(10)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.kill_family()


class Workers:
    """Workers on one ledger; start them, wait until they are active, stop them."""

    def __init__(self, url: str, ledger: Ledger, folder: Path) -> None:
        self.url = url
        self._ledger = ledger
        self._folder = folder
        self.all: list[WorkerProcess] = []

    def start(self, count: int = 1, *arguments: str, **environment: str) -> list[WorkerProcess]:
        begun = [self._start(arguments, environment) for _ in range(count)]
        pids = {worker.pid for worker in begun}
        wait_for(lambda: self._active(begun) >= pids, "workers active", every_s=0.02)
        return begun

    def _start(self, arguments: tuple[str, ...], environment: dict[str, str]) -> WorkerProcess:
        log = self._folder / f"worker-{len(self.all)}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "unstuck.cli.main", "worker", TASKS, *arguments],
                cwd=ROOT,
                env={**os.environ, "UNSTUCK_URL": self.url, "UNSTUCK_LOG_LEVEL": "warning", **environment},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        worker = WorkerProcess(process, log)
        self.all.append(worker)
        return worker

    def _active(self, begun: list[WorkerProcess]) -> set[int]:
        for worker in begun:
            code = worker.process.poll()
            if code is not None:
                raise RuntimeError(f"A worker exited with {code}:\n{worker.log.read_text(errors='replace')}")
        return {record.pid for record in self._ledger.workers.list() if record.state is WorkerState.ACTIVE}

    def cpu(self) -> CpuClock:
        return sum((worker.cpu() for worker in self.all), CpuClock())

    def stop(self) -> None:
        for worker in self.all:
            if worker.process.poll() is None:
                worker.process.send_signal(signal.SIGTERM)
        for worker in self.all:
            worker.stop()
        self.all.clear()


@contextmanager
def workers_on(url: str, ledger: Ledger, folder: Path) -> Iterator[Workers]:
    workers = Workers(url, ledger, folder)
    try:
        yield workers
    finally:
        workers.stop()
