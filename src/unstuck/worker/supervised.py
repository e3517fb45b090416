"""One supervised process: start, signal, replace it, and slow down if replacements die too."""

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from unstuck import host, logs
from unstuck.worker.exit_status import Exit

STEADY_S = 10.0
"""A worker that served so long had started well: its death is the first of a new series."""
FIRST_WAIT_S = 0.5
MAX_WAIT_S = 30.0
BRAKE_AT = 5
"""So many quick deaths in a row are a crash loop."""


@dataclass
class RestartBackoff:
    """The record of one place in the fleet."""

    at_s: float = 0.0
    """Boot time before which nobody is put there."""
    deaths: int = 0
    """Quick deaths in a row."""
    last_code: int = 0
    ever_steady: bool = False
    by_itself: bool = True
    """Every death of this series was an exit of its own, not a signal from outside."""

    def after_death(self, now_s: float, *, lived_s: float, code: int) -> float:
        """Note a death and give the wait before the replacement; `lived_s` is how long it had been registered."""
        if lived_s >= STEADY_S:
            self.ever_steady = True
            self.deaths = 0
            self.by_itself = True
        self.deaths += 1
        self.last_code = code
        self.by_itself &= code > 0
        wait_s = 0.0 if self.deaths == 1 else min(FIRST_WAIT_S * 2.0 ** min(self.deaths - 2, 10), MAX_WAIT_S)
        self.at_s = now_s + wait_s
        return wait_s

    @property
    def braked(self) -> bool:
        return self.deaths >= BRAKE_AT

    @property
    def hopeless(self) -> bool:
        """It never worked, and each time it gave up by itself: waiting longer will not mend that."""
        return self.braked and self.by_itself and not self.ever_steady


# Run in the child before it becomes the worker: another signal from the kernel when the supervisor is gone, and the
# question whether it is gone already. A program of its own, since nothing may run between fork and exec with threads.
LEASH = (
    "import ctypes, os, sys; "
    "ctypes.CDLL(None).prctl(1, 15, 0, 0, 0); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(143); "
    "os.execvp(sys.argv[2], sys.argv[2:])"
)
DEFAULT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGPIPE, signal.SIGUSR1)


class SupervisedWorker(msgspec.Struct):
    """One place in the fleet and who stands in it."""

    number: int
    replacing: RestartBackoff
    pid: int = 0
    started: str = ""
    born_s: float = 0.0
    ready_s: float | None = None
    """When it said that it had registered."""
    heard_s: float = 0.0
    """When it last gave a sign of life."""
    why: str = ""
    """Why we killed it, where we did."""
    retired: bool = False
    """It ended in order without being asked by us: an operator stopped it, and it is not replaced."""

    @property
    def empty(self) -> bool:
        """Nobody is there, and somebody should be."""
        return self.pid == 0 and not self.retired

    def fill(self, command: Sequence[str], extra: Mapping[str, str], now_s: float) -> None:
        """Start a worker process here, with `extra` in its environment."""
        self.pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-I", "-S", "-c", LEASH, str(os.getpid()), *command],
            {**os.environ, **extra},
            file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)],
            setpgroup=0,
            setsigmask=[],
            setsigdef=DEFAULT_SIGNALS,
        )
        # The child is not reaped yet, so this pid is still his, whatever happened to him.
        self.started = host.process_started(self.pid)
        self.born_s = self.heard_s = now_s
        self.ready_s, self.why = None, ""

    def send(self, number: int) -> None:
        # Only to children that are not reaped yet: their pids cannot belong to anybody else.
        if self.pid:
            try:
                os.kill(self.pid, number)
            except OSError:
                pass

    def worked_s(self, now_s: float) -> float:
        """Give how long it served: a slow import that fails in the end is no life."""
        return 0.0 if self.ready_s is None else now_s - self.ready_s


def summary(places: Sequence[SupervisedWorker], now_s: float, *, stopping: bool = False) -> str:
    """Say in one line how the fleet is: for `systemctl status`."""
    alive = sum(1 for worker in places if worker.pid)
    if stopping:
        return f"stopping: {alive} of {len(places)} workers still draining" if alive else "stopped"
    ready = sum(1 for worker in places if worker.pid and worker.ready_s is not None)
    parts = [f"{ready} of {len(places)} workers alive"]
    if alive > ready:
        parts.append(f"{alive - ready} starting")
    if waits_s := [max(0.0, worker.replacing.at_s - now_s) for worker in places if worker.empty]:
        slow = " (dying again and again)" if any(worker.empty and worker.replacing.braked for worker in places) else ""
        parts.append(f"{len(waits_s)} restarting in {min(waits_s):.0f}s{slow}")
    if retired := sum(1 for worker in places if worker.retired):
        parts.append(f"{retired} stopped by an operator")
    return "; ".join(parts)


GRACE_S = 10.0

log = logs.logger("unstuck.supervisor")


class SupervisedDashboard:
    def __init__(self, name: str, command: Sequence[str]) -> None:
        self._name = name
        self._command = list(command)
        self._place = SupervisedWorker(0, RestartBackoff())
        self._kill_at_s: float | None = None

    @property
    def pid(self) -> int:
        return self._place.pid

    def tend(self, now_s: float) -> None:
        """Start it where it is missing."""
        worker = self._place
        if worker.empty and now_s >= worker.replacing.at_s:
            worker.fill(self._command, {}, now_s)
            worker.ready_s = now_s
            log.info(f"{self._name} started", pid=worker.pid)

    def lost(self, end: Exit, now_s: float) -> None:
        """It was reaped."""
        worker = self._place
        wait_s = worker.replacing.after_death(now_s, lived_s=worker.worked_s(now_s), code=end.code)
        worker.pid = 0
        if self._kill_at_s is not None or end.code == 0:
            worker.retired = True
        else:
            log.error(f"{self._name} ended; starting it again", how=str(end), again_in_s=wait_s)

    def stop(self, now_s: float) -> None:
        """Ask it to end; who asks again after its grace kills it."""
        if self._kill_at_s is None:
            self._kill_at_s = now_s + GRACE_S
            self._place.retired = True
            self._place.send(signal.SIGTERM)
        elif now_s >= self._kill_at_s:
            self._place.send(signal.SIGKILL)

    def end(self) -> None:
        """Leave nothing behind, whatever it takes."""
        if self._place.pid:
            self._place.send(signal.SIGKILL)
            os.waitpid(self._place.pid, 0)
            self._place.pid = 0
