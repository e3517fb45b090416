"""Know how much memory this worker and its processes use, and when that is worth telling."""

import os
from collections.abc import Callable

from unstuck import host

WEIGHED_EVERY_S = 10.0
WORTH_TELLING = 0.1
"""A change by this share of what was told; whoever looks wants to know the size, not every page."""
LEAST_CHANGE_BYTES = 4 * 1024 * 1024
MOST_PROCESSES = 512


def own_memory_bytes() -> int:
    """Give the resident memory of this process, the nursery, the runners and what they started.

    What they share is counted for each of them."""
    return host.family_memory_bytes(os.getpid(), MOST_PROCESSES)


class Scales:
    """Of one process. Only the heartbeat's thread weighs."""

    def __init__(self, weigh: Callable[[], int] = own_memory_bytes) -> None:
        self._weigh = weigh
        self._weighed_s = float("-inf")
        self._told_bytes = 0
        self.memory_bytes = 0

    def told(self, memory_bytes: int) -> None:
        """Note what the ledger knows."""
        self._told_bytes = memory_bytes

    def news(self, now_s: float) -> bool:
        """Say whether the ledger should hear of what is used now."""
        if now_s - self._weighed_s >= WEIGHED_EVERY_S:
            self._weighed_s = now_s
            self.memory_bytes = self._weigh() or self.memory_bytes
        change_bytes = abs(self.memory_bytes - self._told_bytes)
        return change_bytes > max(WORTH_TELLING * self._told_bytes, LEAST_CHANGE_BYTES)
