"""Stand in for threads and events of the product where its loops are run as tasks."""

from collections.abc import Callable
from typing import Any

from tests.simulation.hub import Process


class Pause:
    """An event that is never set: who waits for it lets virtual time pass."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def wait(self, timeout_s: float) -> bool:
        task = self._process.hub.current
        assert task is not None
        if timeout_s > 0:
            task.sleep(timeout_s)
        return False

    def is_set(self) -> bool:
        return False


class NoMailbox:
    """A mailbox for loops that are called step by step: they answer their caller and post nothing."""

    def thread(self, what: str, run: Callable[[], None]) -> None:
        """Begin nothing."""

    def post(self, message: Any) -> None:
        raise AssertionError(f"nobody reads {message!r}")
