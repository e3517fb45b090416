"""Say when the broker's process holds so much that its socket must begin afresh.

libzmq keeps without a limit what nobody takes: the words of a peer whose routing id is in use, also when that peer is
long gone, and the parts of a message that never ends. Only a socket that is closed gives that back.
"""

import ctypes
import gc
import os

from unstuck import host

WEIGH_EVERY_S = 0.25
ROOM = 2
"""A sitting may at least double what the process held at its beginning: what is there then was not the last socket's,
and closing the next one would not free it either."""


class Scales:
    """Of one sitting."""

    def __init__(self, limit_bytes: int, now_s: float) -> None:
        self.limit_bytes = max(limit_bytes, ROOM * host.memory_bytes(os.getpid()))
        self._weigh_at_s = now_s + WEIGH_EVERY_S

    def is_over(self, now_s: float) -> bool:
        """Look from time to time whether the limit is passed."""
        if now_s < self._weigh_at_s:
            return False
        self._weigh_at_s = now_s + WEIGH_EVERY_S
        return host.memory_bytes(os.getpid()) > self.limit_bytes


def give_back() -> None:
    """Give memory that was freed to the system: otherwise it would be weighed with what is held."""
    gc.collect()
    # Where the C library has no word for it, it does so by itself, or never.
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
