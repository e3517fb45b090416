"""Carry messages from the other threads to the floor, and wake it."""

import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ThreadFailed:
    """A thread of this worker ended by an error that nobody foresaw."""

    what: str
    error: BaseException


class Mailbox:
    """Many may post; one takes. `fileno` is readable while something may be inside."""

    def __init__(self) -> None:
        self._messages: deque[Any] = deque()
        self._lock = threading.Lock()
        self._closed = False
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        os.set_blocking(self._write_fd, False)

    def fileno(self) -> int:
        return self._read_fd

    @property
    def wakeup_fd(self) -> int:
        """For `signal.set_wakeup_fd`: a signal wakes the floor too."""
        return self._write_fd

    def post(self, message: Any) -> None:
        self._messages.append(message)
        # A thread may outlive the floor (it hung in the ledger), and the number of a closed descriptor may already
        # be another file's: the ledger's own, at worst.
        with self._lock:
            if self._closed:
                return
            try:
                os.write(self._write_fd, b"\0")
            except BlockingIOError:
                pass  # Full of wake-ups: the floor will wake.

    def thread(self, what: str, run: Callable[[], None]) -> threading.Thread:
        """Make a thread whose unforeseen end is told to the floor."""

        def guarded() -> None:
            try:
                run()
            except BaseException as error:  # noqa: BLE001 - handed to the floor, which raises it
                self.post(ThreadFailed(what, error))

        return threading.Thread(target=guarded, name=f"unstuck-{what}", daemon=True)

    def take(self) -> list[Any]:
        """Give everything posted so far, in order."""
        try:
            while len(os.read(self._read_fd, 4096)) == 4096:
                pass
        except BlockingIOError:
            pass
        messages = []
        while self._messages:
            messages.append(self._messages.popleft())
        return messages

    def close(self) -> None:
        with self._lock:
            self._closed = True
            os.close(self._read_fd)
            os.close(self._write_fd)
