"""Remember when this worker itself stood still: what it did not see then is held against nobody."""

from collections import deque

LATE_S = 0.5
"""The floor looks far more often while jobs run. Who looks so late was frozen, asleep or starved, as jobs may be."""
MAX_PAUSES = 32


class Pauses:
    def __init__(self, now_s: float) -> None:
        self._looked_s = now_s
        self._pauses: deque[tuple[float, float]] = deque(maxlen=MAX_PAUSES)

    def look(self, now_s: float) -> None:
        """To be called with every round of the floor."""
        if now_s - self._looked_s > LATE_S:
            self._pauses.append((self._looked_s, now_s))
        self._looked_s = now_s

    def excuse(self, since_s: float) -> float:
        """Give the moment from which to count instead of `since_s`: later by as long as we stood still after it."""
        if not self._pauses or self._pauses[-1][1] <= since_s:
            return since_s
        return since_s + sum(max(0.0, end_s - max(begin_s, since_s)) for begin_s, end_s in self._pauses)
