"""Listen to events from Python, in both colours: `async for event in app.events()`, `for event in job.events()`."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterator

from unstuck.client.runtime import ClientRuntime
from unstuck.domain.event_cursor import read_cursor
from unstuck.domain.events import Event, checked_kinds
from unstuck.domain.units import Duration, seconds
from unstuck.notify.feed import Wake
from unstuck.notify.subscriptions import EventFilter, EventSource, FeedSubscription, JobSubscription

Open = Callable[[Wake], EventSource]


class EventStream:
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
                if reading.is_finished:
                    return
                woken.wait(reading.max_wait_s)
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
                if reading.is_finished:
                    return
                try:
                    await asyncio.wait_for(woken.wait(), reading.max_wait_s)
                except TimeoutError:
                    pass  # Time to look all the same.
        finally:
            reading.close()


def listen(
    runtime: ClientRuntime,
    kinds: Collection[str],
    worker: str | None,
    after: str | None,
    gather: Duration | None,
) -> EventStream:
    """Give what happens in the whole ledger."""
    choice = EventFilter(_kinds(kinds), worker)
    cursor = None if after is None else read_cursor(after)
    gather_s = 0.0 if gather is None else seconds(gather, "gather")

    def open_reading(wake: Wake) -> EventSource:
        parts = runtime.services()
        return FeedSubscription(parts.feed, lambda: runtime.services().ledger, wake, choice, cursor, gather_s)

    return EventStream(open_reading)


def follow(runtime: ClientRuntime, job_id: int, kinds: Collection[str] = (), after: str | None = None) -> EventStream:
    """Give the life of one job until it ends."""
    chosen, cursor = _kinds(kinds), None if after is None else read_cursor(after)
    return EventStream(lambda _: JobSubscription(lambda: runtime.services().ledger, job_id, chosen, cursor))


def _kinds(kinds: Collection[str]) -> frozenset[str]:
    return checked_kinds([kinds] if isinstance(kinds, str) else kinds)
