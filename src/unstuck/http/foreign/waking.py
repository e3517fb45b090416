"""Wake workers that wait for a job: by the bell, and now and then without one.

Those that serve the same queues and know the same tasks are one line. One ring wakes the first of each line that it
concerns; who finds as much as it asked for wakes the next. So a thousand who wait do not all run for one job.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from unstuck import logs
from unstuck.domain.errors import UnstuckError
from unstuck.store.contract import Bell, Ledger

LISTEN_S = 5.0
FIRST_RETRY_S = 0.1
LONGEST_RETRY_S = 5.0

Key = tuple[tuple[str, ...], tuple[str, ...]]
"""Queues and tasks."""

log = logs.logger("unstuck.http")


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


class Ear:
    """A thread that hears every word of the ledger and passes it on to the event loop."""

    def __init__(
        self, ledger: Callable[[], Ledger], loop: asyncio.AbstractEventLoop, heard: Callable[[frozenset[str]], None]
    ) -> None:
        self._ledger = ledger
        self._loop = loop
        self._heard = heard
        self._bell: Bell | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="unstuck-ear", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        bell = self._bell
        if bell is not None:
            bell.interrupt()
        self._thread.join(LISTEN_S)

    def _run(self) -> None:
        retry_s = FIRST_RETRY_S
        while not self._stopping.is_set():
            try:
                self._listen()
                retry_s = FIRST_RETRY_S
            except (UnstuckError, OSError) as error:
                log.warning("The web door cannot hear the bell and looks for jobs now and then", error=str(error))
                self._stopping.wait(retry_s)
                retry_s = min(retry_s * 2, LONGEST_RETRY_S)

    def _listen(self) -> None:
        bell = self._bell = self._ledger().overhear()
        try:
            while not self._stopping.is_set():
                words = bell.wait(LISTEN_S)
                if words:
                    self._tell(words)
        finally:
            self._bell = None
            bell.close()

    def _tell(self, words: frozenset[str]) -> None:
        try:
            self._loop.call_soon_threadsafe(self._heard, words)
        except RuntimeError:
            # The loop is closed: nobody waits any more.
            self._stopping.set()
