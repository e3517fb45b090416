"""The bell: how the ledger wakes who waits."""

from typing import Protocol


class Bell(Protocol):
    """A wake-up that may be lost: losing it costs one poll interval, nothing else."""

    def wait(self, timeout_s: float) -> frozenset[str]:
        """Wait for rings and give their words, coalesced; an empty set when the time is up."""
        ...

    def interrupt(self) -> None:
        """Make `wait` return now; safe from any thread and from a signal handler."""
        ...

    def close(self) -> None: ...
