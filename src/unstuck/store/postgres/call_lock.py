"""Allow one call at a time on a connection: urgent calls go first, and every wait is bounded."""

import threading
import time
from types import TracebackType

from unstuck.domain.errors import LedgerUnavailable

GIVE_WAY_S = 0.001


class CallLock:
    """A reentrant lock with a bounded wait. `with lock:` raises LedgerUnavailable if others keep it for too long."""

    def __init__(self, purpose: str, limit_s: float) -> None:
        self._purpose = purpose
        self._limit_s = limit_s
        self._lock = threading.RLock()
        self._depth = 0
        """How often the owner has it. Read and written by the owner only."""
        self._urgent = 0
        self._counting = threading.Lock()

    def __enter__(self) -> None:
        if not self._lock.acquire(timeout=self._limit_s):
            raise self._busy()
        self._depth += 1
        if self._urgent and self._depth == 1:
            self._give_way()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()

    def acquire_urgently(self) -> None:
        """Be the next, before everybody who waits already: for heartbeats."""
        with self._counting:
            self._urgent += 1
        try:
            entered = self.acquire(self._limit_s)
        finally:
            with self._counting:
                self._urgent -= 1
        if not entered:
            raise self._busy()

    def acquire(self, timeout_s: float = -1) -> bool:
        """Return whether we have it now; a negative timeout waits as long as it takes."""
        entered = self._lock.acquire(timeout=timeout_s)
        if entered:
            self._depth += 1
        return entered

    def try_acquire(self) -> bool:
        """Return whether we have it now. Never waits."""
        entered = self._lock.acquire(blocking=False)
        if entered:
            self._depth += 1
        return entered

    def release(self) -> None:
        self._depth -= 1
        self._lock.release()

    def _give_way(self) -> None:
        """Make way for urgent callers: a plain lock goes to the first thread that wakes."""
        until_s = time.monotonic() + self._limit_s
        while self._urgent and time.monotonic() < until_s:
            self.release()
            time.sleep(GIVE_WAY_S)
            if not self.acquire(self._limit_s):
                raise self._busy()

    def _busy(self) -> LedgerUnavailable:
        # Not LedgerBusy: that says that the server answered, and whoever keeps the connection may wait in vain.
        return LedgerUnavailable(
            f"The {self._purpose} connection to PostgreSQL was in use by other calls of this process for "
            f"{self._limit_s:.1f} s. Nothing was sent. Try again soon."
        )
