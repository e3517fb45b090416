"""Count what each caller asks for, and say when it is too much."""

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from unstuck.http.guard.shared import SharedBuckets

MAX_CALLERS = 10_000


class Buckets(Protocol):
    """What is left to each caller, and since when."""

    def get(self, who: str, full: float) -> tuple[float, float]: ...

    def put(self, who: str, left: float, at_s: float) -> None: ...


class OwnBuckets:
    """Those of one process."""

    def __init__(self) -> None:
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def get(self, who: str, full: float) -> tuple[float, float]:
        return self._buckets.get(who, (full, 0.0))

    def put(self, who: str, left: float, at_s: float) -> None:
        self._buckets[who] = (left, at_s)
        self._buckets.move_to_end(who)
        if len(self._buckets) > MAX_CALLERS:
            self._buckets.popitem(last=False)


class Rates:
    """A bucket per caller: it holds `burst`, and fills by `per_s`. Those not seen for the longest are forgotten."""

    def __init__(
        self,
        per_s: float,
        burst: float,
        clock: Callable[[], float] = time.monotonic,
        shared: SharedBuckets | None = None,
    ) -> None:
        self._per_s = per_s
        self._burst = burst
        self._clock = clock
        self._buckets: Buckets = OwnBuckets() if shared is None else shared

    def wait_s(self, who: str) -> float:
        """Give how long this caller has to wait; 0.0: it may ask now."""
        left = self._left(who)
        return 0.0 if left >= 1 or self._per_s <= 0 else (1 - left) / self._per_s

    def take(self, who: str) -> float:
        """Count one more, and give how long this caller has to wait; 0.0: not at all."""
        wait_s = self.wait_s(who)
        if wait_s == 0.0 and self._per_s > 0:
            self._buckets.put(who, self._left(who) - 1, self._clock())
        return wait_s

    def _left(self, who: str) -> float:
        left, at_s = self._buckets.get(who, self._burst)
        return min(self._burst, left + (self._clock() - at_s) * self._per_s)
