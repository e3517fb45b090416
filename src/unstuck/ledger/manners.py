"""Let whoever is in a hurry go first, within one process: Python runs one thread at a time.

A beat takes a millisecond and passes from thread to thread a dozen times. Beside a thread that reads a thousand rows it
would wait at every pass; so that thread asks now and then whether somebody is in a hurry, and waits a little.
"""

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
STEP_S = 0.0005
MOST_STEPS = 20
"""Nobody waits longer than ten milliseconds at once, however many hurry."""
EVERY = 25


class _Hurry:
    """How many are in a hurry now."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.count = 0

    def add(self, number: int) -> None:
        with self._lock:
            self.count += number


class _OwnHurry(threading.local):
    """How many of them are in this thread."""

    count = 0


_hurrying = _Hurry()
_own = _OwnHurry()


@contextmanager
def hurry() -> Iterator[None]:
    """Have other threads give way while this goes on; for what takes a moment, and never while something is waited for
    that may not come."""
    _hurrying.add(1)
    _own.count += 1
    try:
        yield
    finally:
        _own.count -= 1
        _hurrying.add(-1)


def is_hurried() -> bool:
    """Return whether anything in this process is in a hurry."""
    return _hurrying.count > 0


def give_way() -> None:
    """Wait a moment if another thread is in a hurry and this one is not. Costs next to nothing if none is."""
    for _ in range(MOST_STEPS):
        if not _hurrying.count or _own.count:
            return
        time.sleep(STEP_S)


def politely(items: Iterable[T]) -> Iterator[T]:
    """Go through many items, and give way now and then."""
    for number, item in enumerate(items, 1):
        if not number % EVERY:
            give_way()
        yield item
