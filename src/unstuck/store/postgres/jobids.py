"""Reserve job ids ahead, so that single enqueues in quick succession need one round trip each, not two."""

import time
from collections.abc import Callable

FRESH_S = 0.1
"""Ids in hand for longer are dropped: ids should go with time, also between clients."""
MAX_AHEAD = 64


class JobIds:
    """Not safe by itself: use it under the lock of the lane that fetches."""

    def __init__(self, fetch: Callable[[int], list[int]]) -> None:
        self._fetch = fetch
        self._ids: list[int] = []
        self._ahead = 0
        self._until_s = 0.0

    def forget(self) -> None:
        self._until_s = 0.0

    def take(self, count: int) -> list[int]:
        now = time.monotonic()
        if now > self._until_s:
            # Too slow to profit: fetch no more than needed until callers come quickly again.
            self._ids, self._ahead = [], 0
        if len(self._ids) < count:
            needed = count - len(self._ids)
            self._ids += self._fetch(needed + self._ahead)
            self._until_s = time.monotonic() + FRESH_S
            self._ahead = min(MAX_AHEAD, 2 * self._ahead + 1)
        taken, self._ids = self._ids[:count], self._ids[count:]
        return taken
