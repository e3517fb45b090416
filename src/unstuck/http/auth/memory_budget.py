"""Bound how many bytes of bodies and answers are in memory at once, in total and for each caller.

A request that finds no room waits for it: before its body is read, so that the bytes stay with the sender, and before
its answer is made. Small bodies are read first and have a budget of their own: a client that is slow to send a large
one keeps no heartbeat waiting.
"""

import asyncio
import gc
from collections import Counter, deque
from dataclasses import dataclass, field

from unstuck import host
from unstuck.http.problems import Problem

BODIES = 4
"""Bodies of the largest size that are worked on at once: what is made of a body takes many times its size."""
BODIES_EACH = 2
"""Of one caller."""
LEAST_BYTES = 1024
"""What the smallest of them counts for."""
WAIT_S = 20.0
LARGE_BYTES = 256 * 1024
COLLECT_AFTER_S = 0.2
"""After the last large one: an error keeps what it was about until the collector comes, and that may be in hours."""


@dataclass
class Room:
    """Room for one body or answer, until it is released."""

    budget: "MemoryBudget"
    who: str
    size_bytes: int

    def resize(self, size_bytes: int) -> None:
        """Count what is really taken. More than was asked for is counted as well, whether there is room or not."""
        self.budget._resize(self, max(size_bytes, LEAST_BYTES))

    def release(self) -> None:
        """Give all of it back; a second time does nothing."""
        self.budget._resize(self, 0)


@dataclass(eq=False)
class _Waiting:
    room: Room
    granted: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class MemoryBudget:
    """Belongs to one event loop."""

    def __init__(self, most_bytes: int, most_each_bytes: int, what: str) -> None:
        self._most = most_bytes
        self._most_each = most_each_bytes
        self._what = what
        self._taken: Counter[str] = Counter()
        self._total = 0
        self._waiting: dict[str, deque[_Waiting]] = {}
        self._collecting: asyncio.TimerHandle | None = None

    def try_take(self, who: str, size_bytes: int) -> Room | None:
        """Return room, or None if there is none now. One that is larger than a caller's share gets all of that."""
        room = Room(self, who, min(max(size_bytes, LEAST_BYTES), self._most_each))
        if who in self._waiting or not self._fits(room):
            return None
        self._enter(room)
        return room

    async def take(self, who: str, size_bytes: int) -> Room:
        """Like `try_take`, but wait for others to end if need be; raise the problem if that takes too long."""
        if (room := self.try_take(who, size_bytes)) is not None:
            return room
        waiting = _Waiting(Room(self, who, min(max(size_bytes, LEAST_BYTES), self._most_each)))
        self._waiting.setdefault(who, deque()).append(waiting)
        try:
            async with asyncio.timeout(WAIT_S):
                await waiting.granted
        except BaseException as error:
            if waiting in self._waiting.get(who, ()):
                self._leave(waiting)
                # It may have kept smaller ones behind it waiting.
                self._let_in()
            elif waiting.granted.done() and not waiting.granted.cancelled():
                waiting.room.release()
            if isinstance(error, TimeoutError):
                raise self._busy() from None
            raise
        return waiting.room

    def _fits(self, room: Room) -> bool:
        return (
            self._total + room.size_bytes <= self._most and self._taken[room.who] + room.size_bytes <= self._most_each
        )

    def _enter(self, room: Room) -> None:
        self._total += room.size_bytes
        self._taken[room.who] += room.size_bytes

    def _leave(self, waiting: _Waiting) -> None:
        who = waiting.room.who
        self._waiting[who].remove(waiting)
        if not self._waiting[who]:
            del self._waiting[who]

    def _resize(self, room: Room, size_bytes: int) -> None:
        grown = size_bytes - room.size_bytes
        if grown == 0:
            return
        if grown < 0 and room.size_bytes >= LARGE_BYTES:
            self._collect_soon()
        room.size_bytes = size_bytes
        self._total += grown
        self._taken[room.who] += grown
        if not self._taken[room.who]:
            del self._taken[room.who]
        if grown < 0 and self._waiting:
            self._let_in()

    def _collect_soon(self) -> None:
        if self._collecting is not None:
            self._collecting.cancel()
        self._collecting = asyncio.get_running_loop().call_later(COLLECT_AFTER_S, _return_memory)

    def _let_in(self) -> None:
        """Let in those who fit, callers by turns; one who has taken its share keeps no other waiting."""
        while True:
            fitting = [queue[0] for queue in self._waiting.values() if self._fits(queue[0].room)]
            if not fitting:
                return
            for waiting in fitting:
                if self._fits(waiting.room):
                    self._leave(waiting)
                    self._enter(waiting.room)
                    # Cancelled a moment ago, it will not come for its room.
                    if waiting.granted.done():
                        waiting.room.release()
                    else:
                        waiting.granted.set_result(None)

    def _busy(self) -> Problem:
        return Problem(
            429,
            "too_many_requests",
            f"Too many large {self._what} at once.",
            cure=f"Wait a moment, and have fewer large {self._what} at once.",
            headers={"Retry-After": "1"},
        )


def _return_memory() -> None:
    gc.collect()
    host.release_free_memory()
