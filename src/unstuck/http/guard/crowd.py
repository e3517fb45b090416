"""Bound how many requests are open at once, of everybody and of each caller: those that wait and stream included."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from unstuck.http.guard.shared import Member


class Crowd:
    def __init__(self, most: int, most_each: int, member: Member | None = None) -> None:
        self._most = most
        self._most_each = most_each
        self._open: Counter[str] = Counter()
        self._total = 0
        self._shared = None if member is None else member.group.open_requests
        self._number = 0 if member is None else member.number

    def is_full(self, who: str) -> bool:
        total, own = (0, 0) if self._shared is None else self._shared.elsewhere(self._number, who)
        return self._total + total >= self._most or self._open[who] + own >= self._most_each

    @contextmanager
    def seat(self, who: str) -> Iterator[None]:
        self._open[who] += 1
        self._total += 1
        if self._shared is not None:
            self._shared.note(self._number, who, 1)
        try:
            yield
        finally:
            if self._shared is not None:
                self._shared.note(self._number, who, -1)
            self._total -= 1
            self._open[who] -= 1
            if not self._open[who]:
                del self._open[who]
