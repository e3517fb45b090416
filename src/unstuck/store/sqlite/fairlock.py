"""Hand the right to write from process to process fairly, and take it away from the frozen.

SQLite's own busy waiting starves: whoever sleeps longest loses. So every write transaction of Unstuck runs
inside a `flock` on `<file>-lock`. Correctness does not hang on it (SQLite locks for itself); order does.
"""

import fcntl
import os
import threading
import time
from pathlib import Path

from unstuck import host
from unstuck.store.sqlite.errors import locked
from unstuck.store.sqlite.holder import Holder, Watch, clear_holder, read_holder, write_holder, write_mark
from unstuck.store.sqlite.turnstile import Turnstile

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
                self._helper = threading.Thread(target=self._help, name="unstuck-flock", daemon=True)
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
