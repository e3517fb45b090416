"""The places of a fleet: put a worker process into one, and say in one line how all of them are."""

import os
import signal
import sys
from collections.abc import Mapping, Sequence

import msgspec

from unstuck import host
from unstuck.worker.replacing import Replacing

# Run in the child before it becomes the worker: another signal from the kernel when the supervisor is gone, and the
# question whether it is gone already. A program of its own, since nothing may run between fork and exec with threads.
LEASH = (
    "import ctypes, os, sys; "
    "sys.platform == 'linux' and ctypes.CDLL(None).prctl(1, 15, 0, 0, 0); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(143); "
    "os.execvp(sys.argv[2], sys.argv[2:])"
)
DEFAULT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGPIPE, signal.SIGUSR1)


class Place(msgspec.Struct):
    """One place in the fleet and who stands in it."""

    number: int
    replacing: Replacing
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


def summary(places: Sequence[Place], now_s: float, *, stopping: bool = False) -> str:
    """Say in one line how the fleet is: for `systemctl status`."""
    alive = sum(1 for place in places if place.pid)
    if stopping:
        return f"stopping: {alive} of {len(places)} workers still draining" if alive else "stopped"
    ready = sum(1 for place in places if place.pid and place.ready_s is not None)
    parts = [f"{ready} of {len(places)} workers alive"]
    if alive > ready:
        parts.append(f"{alive - ready} starting")
    if waits_s := [max(0.0, place.replacing.at_s - now_s) for place in places if place.empty]:
        slow = " (dying again and again)" if any(place.empty and place.replacing.braked for place in places) else ""
        parts.append(f"{len(waits_s)} restarting in {min(waits_s):.0f}s{slow}")
    if retired := sum(1 for place in places if place.retired):
        parts.append(f"{retired} stopped by an operator")
    return "; ".join(parts)
