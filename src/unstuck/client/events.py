"""Listen to events from Python, in both colours: `async for event in app.events()`, `for event in job.events()`."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterator

from unstuck.client.counter import Counter
from unstuck.domain.cursor import read_cursor
from unstuck.domain.durations import Duration, seconds
from unstuck.domain.events import Event, checked_kinds
from unstuck.notify.feed import Wake
from unstuck.notify.subscription import Choice, JobSubscription, Reading, Subscription

Open = Callable[[Wake], Reading]


class Events:
    """A stream of events. It begins when it is iterated, and ends with the iteration."""

    def __init__(self, open_reading: Open) -> None:
        self._open = open_reading

    def __iter__(self) -> Iterator[Event]:
        woken = threading.Event()
        reading = self._open(woken.set)
        try:
            while True:
                woken.clear()
                yield from reading.take()
                if reading.over:
                    return
                woken.wait(reading.patience_s)
        finally:
            reading.close()

    async def __aiter__(self) -> AsyncIterator[Event]:
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(woken.set)

        reading = await asyncio.to_thread(self._open, wake)
        try:
            while True:
                woken.clear()
                for event in await asyncio.to_thread(reading.take):
                    yield event
                if reading.over:
                    return
                try:
                    await asyncio.wait_for(woken.wait(), reading.patience_s)
                except TimeoutError:
                    pass  # Time to look all the same.
        finally:
            reading.close()


def listen(
    counter: Counter,
    kinds: Collection[str],
    worker: str | None,
    after: str | None,
    gather: Duration | None,
) -> Events:
    """Give what happens in the whole ledger."""
    choice = Choice(_kinds(kinds), worker)
    cursor = None if after is None else read_cursor(after)
    gather_s = 0.0 if gather is None else seconds(gather, "gather")

    def open_reading(wake: Wake) -> Reading:
        parts = counter.parts()
        return Subscription(parts.feed, lambda: counter.parts().ledger, wake, choice, cursor, gather_s)

    return Events(open_reading)


def follow(counter: Counter, job_id: int, kinds: Collection[str] = (), after: str | None = None) -> Events:
    """Give the life of one job until it ends."""
    chosen, cursor = _kinds(kinds), None if after is None else read_cursor(after)
    return Events(lambda _: JobSubscription(lambda: counter.parts().ledger, job_id, chosen, cursor))


def _kinds(kinds: Collection[str]) -> frozenset[str]:
    return checked_kinds([kinds] if isinstance(kinds, str) else kinds)
