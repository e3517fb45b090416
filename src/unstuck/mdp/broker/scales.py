"""Say when the broker's process holds so much that its socket must begin afresh.

libzmq keeps without a limit what nobody takes: the words of a peer whose routing id is in use, also when that peer is
long gone, and the parts of a message that never ends. Only a socket that is closed gives that back.
"""

import ctypes
import gc
import os

from unstuck import host

WEIGH_EVERY_S = 0.25
TRIM_EVERY_S = 1.0
LONGEST_PAUSE_S = 30.0
PEAK_BYTES = 64 * 1024 * 1024
"""What the process must hold beyond its first weight before freed memory is worth giving back."""
ROOM = 2
"""A sitting may at least double what the process held at its beginning: what is there then was not the last socket's,
and closing the next one would not free it either."""


class Scales:
    """Of one sitting."""

    def __init__(self, limit_bytes: int, now_s: float) -> None:
        self._at_first_bytes = host.memory_bytes(os.getpid())
        self.limit_bytes = max(limit_bytes, ROOM * self._at_first_bytes)
        self._weigh_at_s = now_s + WEIGH_EVERY_S
        self._trim_at_s = now_s
        self._pause_s = TRIM_EVERY_S

    def is_over(self, now_s: float) -> bool:
        """Look from time to time whether the limit is passed. Memory that was only freed does not count, and is given
        back after a peak."""
        if now_s < self._weigh_at_s:
            return False
        self._weigh_at_s = now_s + WEIGH_EVERY_S
        held_bytes = host.memory_bytes(os.getpid())
        if held_bytes > self._at_first_bytes + PEAK_BYTES and now_s >= self._trim_at_s:
            trim()
            before_bytes, held_bytes = held_bytes, host.memory_bytes(os.getpid())
            # It takes a while with a large heap. If all of it is in use, there is no need to try again soon.
            in_use = held_bytes > before_bytes - PEAK_BYTES / 4
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S) if in_use else TRIM_EVERY_S
            self._trim_at_s = now_s + self._pause_s
        return held_bytes > self.limit_bytes


def trim() -> None:
    """Give memory that was freed to the system: otherwise it would be weighed with what is held."""
    # Where the C library has no word for it, it does so by itself, or never.
    if (release := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        release(0)


def give_back() -> None:
    """Free what only cycles of objects hold, and give it to the system."""
    gc.collect()
    trim()
