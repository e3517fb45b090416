"""Name the holder of the write lock in the lock file, and end a holder that is frozen."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path

from unstuck import host, logs
from unstuck.domain.liveness import Process

RECORD_BYTES = 128
SLOW_KILL_AFTER_S = 10.0
"""A holder that is not stopped is given at least so long, however short the heartbeat timeout is."""
MARK_BYTES = 64
"""Behind the holder: which ledger the file beside the lock holds. It outlives that file."""
_EMPTY = b"-".ljust(RECORD_BYTES)

log = logs.logger(__name__)


@dataclass(frozen=True)
class Holder:
    pid: int
    started: str
    number: int
    """Counts the acquisitions of one process: the same number means the same transaction."""
    since_boot_s: float
    limit_s: float
    """How long the holder says that it may need at most; 0 for the usual."""
    pid_namespace: str

    def encode(self) -> bytes:
        text = f"{self.pid} {self.started or '0'} {self.number} {self.since_boot_s:.3f} {self.limit_s:g} "
        return (text + (self.pid_namespace or "-")).encode().ljust(RECORD_BYTES)[:RECORD_BYTES]


def write_holder(fd: int, holder: Holder) -> None:
    os.pwrite(fd, holder.encode(), 0)


def clear_holder(fd: int) -> None:
    # Cleared before the lock is let go: a name that was left behind could get an innocent process killed.
    os.pwrite(fd, _EMPTY, 0)


def read_holder(fd: int) -> Holder | None:
    """Give who holds the lock, or None where nobody says so."""
    parts = os.pread(fd, RECORD_BYTES, 0).decode("ascii", "replace").split()
    try:
        pid, started, number, since_boot_s, limit_s, namespace = parts
        return Holder(int(pid), started, int(number), float(since_boot_s), float(limit_s), namespace)
    except ValueError:
        return None


def write_mark(fd: int, ledger_id: str) -> None:
    """Note which ledger there is, so that a client that finds no file does not begin an empty one in its place."""
    mark = ledger_id.encode().ljust(MARK_BYTES)[:MARK_BYTES]
    if os.pread(fd, MARK_BYTES, RECORD_BYTES) != mark:
        os.pwrite(fd, mark, RECORD_BYTES)


def read_mark(path: Path) -> str | None:
    """Return which ledger was noted in a lock file, if there is one."""
    try:
        with path.open("rb") as file:
            mark = os.pread(file.fileno(), MARK_BYTES, RECORD_BYTES)
    except OSError:
        return None
    return mark.decode("ascii", "replace").strip() or None


class Watch:
    """Watch one lock from the side of somebody who waits for it."""

    def __init__(self, kill_after_s: float, tick_s: float) -> None:
        self._kill_after_s = kill_after_s
        self._tick_s = tick_s
        self._seen: Holder | None = None
        self._waited_s = 0.0
        self._last_boot_s = host.boottime_s()

    def tick(self, holder: Holder | None, path: str) -> bool:
        """Say whether the holder was killed. Called again and again while waiting."""
        now_s = host.boottime_s()
        # If we were frozen ourselves, that time says nothing about the holder.
        step_s = min(now_s - self._last_boot_s, 4 * self._tick_s)
        self._last_boot_s = now_s
        if holder is None or holder != self._seen:
            self._seen, self._waited_s = holder, 0.0
            return False
        self._waited_s += step_s
        if self._waited_s < self._patience_s(holder):
            return False
        self._waited_s = 0.0
        return _end(holder, path)

    def _patience_s(self, holder: Holder) -> float:
        """A stopped process will not move by itself; one that is only slow may be waiting for its disk."""
        if _is_stopped(holder.pid):
            return self._kill_after_s
        return max(2 * self._kill_after_s, SLOW_KILL_AFTER_S, holder.limit_s)


def _is_stopped(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat[stat.rindex(")") + 2] in "Tt"


def _end(holder: Holder, path: str) -> bool:
    """Kill a holder that is provably the process that took the lock; anything less certain is left alone."""
    if holder.pid == os.getpid() or holder.pid_namespace != (host.pid_namespace() or "-"):
        return False
    if host.look(holder.pid, holder.started) is not Process.ALIVE:
        return False
    fd = host.pidfd(holder.pid, holder.started)
    try:
        if fd is not None:
            signal.pidfd_send_signal(fd, signal.SIGKILL)
        else:
            os.kill(holder.pid, signal.SIGKILL)
    except OSError as error:
        log.error(
            f"Process {holder.pid} has been holding the write lock of {path} for too long and cannot be killed: "
            f"{error}. Kill it by hand.",
            pid=holder.pid,
        )
        return False
    finally:
        if fd is not None:
            os.close(fd)
    log.error(
        f"Process {holder.pid} was frozen inside a write of {path} and was killed, so that the others can go on.",
        pid=holder.pid,
    )
    return True
