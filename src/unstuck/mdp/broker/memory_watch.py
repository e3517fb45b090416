"""The limit on the memory of a broker, beyond which it closes its socket and opens a new one."""

import gc
import os

from unstuck import host

MEASURE_EVERY_S = 0.25
TRIM_EVERY_S = 1.0
LONGEST_PAUSE_S = 30.0
PEAK_BYTES = 64 * 1024 * 1024
"""How much more than at first the process must hold before freed memory is returned to the system."""
ROOM = 2
"""The process may at least double its memory while it serves one socket. What it held at first was not that of the last
socket, so closing the next one would not free it either."""


class MemoryWatch:
    """Watches the memory of the process while it serves one socket."""

    def __init__(self, limit_bytes: int, now_s: float) -> None:
        self._at_first_bytes = host.memory_bytes(os.getpid())
        self.limit_bytes = max(limit_bytes, ROOM * self._at_first_bytes)
        self._measure_at_s = now_s + MEASURE_EVERY_S
        self._trim_at_s = now_s
        self._pause_s = TRIM_EVERY_S

    def is_over(self, now_s: float) -> bool:
        """Return whether the limit is exceeded, measured from time to time. Memory that is free but not yet returned to
        the system does not count. After a peak it is returned."""
        if now_s < self._measure_at_s:
            return False
        self._measure_at_s = now_s + MEASURE_EVERY_S
        held_bytes = host.memory_bytes(os.getpid())
        if held_bytes > self._at_first_bytes + PEAK_BYTES and now_s >= self._trim_at_s:
            host.release_free_memory()
            before_bytes, held_bytes = held_bytes, host.memory_bytes(os.getpid())
            # It takes long with a large heap. If all of it is in use, the next try can wait.
            in_use = held_bytes > before_bytes - PEAK_BYTES / 4
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S) if in_use else TRIM_EVERY_S
            self._trim_at_s = now_s + self._pause_s
        return held_bytes > self.limit_bytes


def release_memory() -> None:
    """Free cycles of objects, and return free memory to the system."""
    gc.collect()
    host.release_free_memory()
