"""Wake workers that wait for a job: by the bell, and now and then without one.

Those that serve the same queues and know the same tasks are one line. One ring wakes the first of each line that it
concerns; who finds as much as it asked for wakes the next. So a thousand who wait do not all run for one job.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

Key = tuple[tuple[str, ...], tuple[str, ...]]
"""Queues and tasks."""


class Waiter:
    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id
        self.told = False
        """Somebody has a word for this very worker."""
        self._woken = asyncio.Event()

    @property
    def woken(self) -> bool:
        return self._woken.is_set()

    def wake(self) -> None:
        self._woken.set()

    def rest(self) -> None:
        self._woken.clear()

    async def wait(self) -> None:
        await self._woken.wait()


class Wakeups:
    """The lines of those who wait. Everything but `heard` belongs to the event loop."""

    def __init__(self, poll_s: float) -> None:
        self._poll_s = poll_s
        self._lines: dict[Key, dict[Waiter, None]] = {}
        self._polling: asyncio.Task[None] | None = None
        self.hushed = False
        """Nobody waits any more: the door is being closed."""

    @property
    def is_waited_for(self) -> bool:
        """Return whether any worker stands in line."""
        return bool(self._lines)

    @contextmanager
    def line(self, key: Key, worker_id: str) -> Iterator[Waiter]:
        """Stand in line; what is rung meanwhile is not lost, whether one waits or looks."""
        waiter = Waiter(worker_id)
        self._lines.setdefault(key, {})[waiter] = None
        if self._polling is None:
            self._polling = asyncio.get_running_loop().create_task(self._poll())
        try:
            yield waiter
        finally:
            line = self._lines[key]
            del line[waiter]
            if not line:
                del self._lines[key]
            elif waiter.woken:
                # It leaves with what it found before: the ring was for whoever comes next.
                self.wake_next(key)

    def wake_next(self, key: Key) -> None:
        for waiter in self._lines.get(key, ()):
            if not waiter.woken:
                waiter.wake()
                return

    def doubt(self) -> None:
        """A word for anybody may have been lost: let all who wait ask what is wanted of them."""
        for line in self._lines.values():
            for waiter in line:
                waiter.told = True
                waiter.wake()

    def heard(self, words: frozenset[str]) -> None:
        """Wake whom these words concern."""
        queues = {word.partition(":")[2] for word in words if word.startswith("queue:")}
        workers = {word.partition(":")[2] for word in words if word.startswith("worker:")}
        for key, line in self._lines.items():
            if not queues.isdisjoint(key[0]):
                self.wake_next(key)
            for waiter in line if workers else ():
                if waiter.worker_id in workers:
                    waiter.told = True
                    waiter.wake()

    def hush(self) -> None:
        """Have everybody go home with what they have."""
        self.hushed = True
        for line in self._lines.values():
            for waiter in line:
                waiter.wake()

    async def _poll(self) -> None:
        try:
            while self._lines:
                await asyncio.sleep(self._poll_s)
                for key in list(self._lines):
                    self.wake_next(key)
        finally:
            self._polling = None
