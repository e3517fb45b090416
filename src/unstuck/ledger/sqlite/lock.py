"""The write lock of a SQLite file: fair between threads, and released from holders that are frozen."""

import fcntl
import os
import signal
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from unstuck import host, logs
from unstuck.domain.liveness import Process
from unstuck.ledger.sqlite.errors import locked


class Turnstile:
    """A first-come-first-served lock: a busy thread cannot starve the heartbeat."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._taken = False
        self._line: deque[threading.Lock] = deque()

    def acquire(self, timeout_s: float) -> bool:
        with self._guard:
            if not self._taken:
                self._taken = True
                return True
            gate = threading.Lock()
            gate.acquire()
            self._line.append(gate)
        if gate.acquire(timeout=max(timeout_s, 0.0)):
            return True
        with self._guard:
            try:
                self._line.remove(gate)
            except ValueError:
                # Handed over between the end of our patience and now: it is ours.
                return True
            return False

    def release(self) -> None:
        with self._guard:
            if self._line:
                self._line.popleft().release()
            else:
                self._taken = False


RECORD_BYTES = 128
SLOW_KILL_AFTER_S = 10.0
"""A holder that is not stopped is given at least so long, however short the heartbeat timeout is."""
MARK_BYTES = 64
"""Behind the holder: which ledger the file beside the lock holds. It outlives that file."""
_EMPTY = b"-".ljust(RECORD_BYTES)

log = logs.logger("unstuck.ledger")


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
    if host.process_state(holder.pid, holder.started) is not Process.ALIVE:
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


TICK_S = 0.1
LEAST_KILL_AFTER_S = 1.0
HELPER_IDLE_S = 5.0


class FairLock:
    def __init__(self, path: Path, kill_after_s: float) -> None:
        self.path = path
        self._kill_after_s = max(kill_after_s, LEAST_KILL_AFTER_S)
        self._reset()

    def _reset(self) -> None:
        self._turnstile = Turnstile()
        self._fd: int | None = None
        self._number = 0
        self._me = (os.getpid(), host.process_started(os.getpid()), host.pid_namespace())
        # The kernel's lock cannot be waited for with a timeout, so a thread of its own does the waiting.
        self._asking = threading.Condition()
        self._wanted = self._granted = self._blocked = False
        self._helper: threading.Thread | None = None

    def acquire(self, deadline: float, limit_s: float = 0.0) -> None:
        """Get the lock before `deadline` (of time.monotonic) or raise LedgerUnavailable.

        `limit_s`: how long we may keep it at most, where that is longer than usual."""
        if not self._turnstile.acquire(deadline - time.monotonic()):
            raise locked(str(self.path).removesuffix("-lock"))
        try:
            fd = self._open()
            if not self._try(fd):
                self._wait(fd, deadline)
            self._number += 1
            pid, started, namespace = self._me
            write_holder(fd, Holder(pid, started, self._number, host.boottime_s(), limit_s, namespace))
        except BaseException:
            self._turnstile.release()
            raise

    def release(self) -> None:
        fd = self._fd
        assert fd is not None
        try:
            clear_holder(fd)
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)
            self._turnstile.release()

    def mark(self, ledger_id: str) -> None:
        """Note which ledger the lock belongs to. Called by whoever holds it."""
        assert self._fd is not None
        write_mark(self._fd, ledger_id)

    def forget(self) -> None:
        """In the child of a fork: close our copy, so that the lock ends with the parent, and begin anew."""
        if self._fd is not None:
            os.close(self._fd)
        self._reset()

    def close(self) -> None:
        """Let go of the file, if nobody is waiting for it just now."""
        if not self._turnstile.acquire(0.0):
            return
        try:
            with self._asking:
                if self._fd is not None and not self._blocked:
                    os.close(self._fd)
                    self._fd = None
        finally:
            self._turnstile.release()

    def __del__(self) -> None:
        # Dropped without `close`: a number of its own must not stay taken.
        fd: int | None = getattr(self, "_fd", None)
        if fd is not None:
            os.close(fd)

    def _open(self) -> int:
        with self._asking:
            if self._fd is not None and not self._blocked and not os.fstat(self._fd).st_nlink:
                # Deleted by somebody who tidied up: the others lock a new file by now.
                os.close(self._fd)
                self._fd = None
        if self._fd is None:
            mode = os.stat(str(self.path).removesuffix("-lock")).st_mode & 0o777
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)
        return self._fd

    def _try(self, fd: int) -> bool:
        # While the helper still waits for someone who gave up, a lock taken here would be let go by it there.
        with self._asking:
            if self._blocked:
                return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _wait(self, fd: int, deadline: float) -> None:
        watch = Watch(self._kill_after_s, TICK_S)
        with self._asking:
            self._wanted = True
            if self._helper is None:
                self._helper = threading.Thread(target=self._help, name="unstuck-write-lock", daemon=True)
                self._helper.start()
            self._asking.notify_all()
            while not self._granted:
                if time.monotonic() >= deadline:
                    self._wanted = False
                    raise locked(str(self.path).removesuffix("-lock"))
                if not self._asking.wait(TICK_S):
                    watch.tick(read_holder(fd), str(self.path))
            self._wanted = self._granted = False

    def _help(self) -> None:
        while True:
            with self._asking:
                while not self._wanted or self._granted:
                    if not self._asking.wait(HELPER_IDLE_S):
                        self._helper = None
                        return
                fd = self._fd
                assert fd is not None
                self._blocked = True
            fcntl.flock(fd, fcntl.LOCK_EX)
            self._hand_over(fd)

    def _hand_over(self, fd: int) -> None:
        with self._asking:
            self._blocked = False
            if self._wanted:
                self._granted = True
                self._asking.notify_all()
            else:
                # Whoever asked has given up in the meantime.
                fcntl.flock(fd, fcntl.LOCK_UN)
