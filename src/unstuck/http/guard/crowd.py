"""Bound how many requests are open at once, of everybody and of each caller: those that wait and stream included."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class Crowd:
    def __init__(self, most: int, most_each: int) -> None:
        self._most = most
        self._most_each = most_each
        self._open: Counter[str] = Counter()
        self._total = 0

    def is_full(self, who: str) -> bool:
        return self._total >= self._most or self._open[who] >= self._most_each

    @contextmanager
    def seat(self, who: str) -> Iterator[None]:
        self._open[who] += 1
        self._total += 1
        try:
            yield
        finally:
            self._total -= 1
            self._open[who] -= 1
            if not self._open[who]:
                del self._open[who]
