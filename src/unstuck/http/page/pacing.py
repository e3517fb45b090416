"""Ask what is dear to answer less often, so that an open page costs the ledger a small share of its time."""

import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

FREE_S = 0.05
"""What takes no longer may be asked each time."""
RESTS_FOR = 10.0
"""So many times as long as the answer took beyond that: a tenth of somebody's time, or little more."""
LONGEST_REST_S = 15.0


class Paced(Generic[T]):
    """Keeps an answer for as long as it was dear: to count a million jobs takes a moment."""

    def __init__(self, ask: Callable[[], T], clock: Callable[[], float] = time.monotonic) -> None:
        self._ask = ask
        self._clock = clock
        self._kept: T | None = None
        self._until_s = float("-inf")

    def get(self) -> T:
        began_s = self._clock()
        if self._kept is None or began_s >= self._until_s:
            self._kept = self._ask()
            ended_s = self._clock()
            rest_s = RESTS_FOR * (ended_s - began_s - FREE_S)
            self._until_s = ended_s + min(max(0.0, rest_s), LONGEST_REST_S)
        return self._kept

    def forget(self) -> None:
        self._kept = None
