"""Count what each caller asks for, and say when it is too much."""

import time
from collections import OrderedDict
from collections.abc import Callable

MAX_CALLERS = 10_000


class Rates:
    """A bucket per caller: it holds `burst`, and fills by `per_s`. Those not seen for the longest are forgotten."""

    def __init__(self, per_s: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._burst = burst
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait_s(self, who: str) -> float:
        """Give how long this caller has to wait; 0.0: it may ask now."""
        left = self._left(who)
        return 0.0 if left >= 1 or self._per_s <= 0 else (1 - left) / self._per_s

    def take(self, who: str) -> float:
        """Count one more, and give how long this caller has to wait; 0.0: not at all."""
        wait_s = self.wait_s(who)
        if wait_s == 0.0 and self._per_s > 0:
            self._buckets[who] = (self._left(who) - 1, self._clock())
            self._buckets.move_to_end(who)
            if len(self._buckets) > MAX_CALLERS:
                self._buckets.popitem(last=False)
        return wait_s

    def _left(self, who: str) -> float:
        left, at_s = self._buckets.get(who, (self._burst, 0.0))
        return min(self._burst, left + (self._clock() - at_s) * self._per_s)
