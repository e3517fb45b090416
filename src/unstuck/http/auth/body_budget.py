"""Bound how many bytes of bodies are read and worked on at once: what is made of a body takes many times its size.

A request that finds no room waits for it before its body is read, so that the bytes stay with the sender.
"""

import asyncio
import gc
from collections import Counter, deque
from dataclasses import dataclass, field

from unstuck import host
from unstuck.http.problems import Problem

BODIES = 4
"""Bodies of the largest size that are worked on at once."""
BODIES_EACH = 2
"""Of one caller."""
LEAST_BYTES = 1024
"""What the smallest body counts for."""
WAIT_S = 20.0
LARGE_BYTES = 256 * 1024
COLLECT_AFTER_S = 0.2
"""After the last large body: an error keeps what it was about until the collector comes, and that may be in hours."""


@dataclass
class Room:
    """Room for one body, until it is released."""

    budget: "BodyBudget"
    who: str
    size_bytes: int

    def shrink(self, size_bytes: int) -> None:
        """Keep only what the body really took."""
        self.budget._give_back(self, self.size_bytes - max(size_bytes, LEAST_BYTES))

    def release(self) -> None:
        """Give all of it back; a second time does nothing."""
        self.budget._give_back(self, self.size_bytes)


@dataclass(eq=False)
class _Waiting:
    room: Room
    granted: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class BodyBudget:
    """Belongs to one event loop."""

    def __init__(self, max_body_bytes: int) -> None:
        self._most = BODIES * max(max_body_bytes, LEAST_BYTES)
        self._most_each = BODIES_EACH * max(max_body_bytes, LEAST_BYTES)
        self._taken: Counter[str] = Counter()
        self._total = 0
        self._waiting: deque[_Waiting] = deque()
        self._collecting: asyncio.TimerHandle | None = None

    async def take(self, who: str, size_bytes: int) -> Room:
        """Take room for a body, waiting for others to end if need be; raise the problem if that takes too long."""
        room = Room(self, who, max(size_bytes, LEAST_BYTES))
        if self._fits(room) and not any(other.room.who == who for other in self._waiting):
            self._enter(room)
            return room
        waiting = _Waiting(room)
        self._waiting.append(waiting)
        try:
            async with asyncio.timeout(WAIT_S):
                await waiting.granted
        except BaseException as error:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            elif waiting.granted.done() and not waiting.granted.cancelled():
                room.release()
            if isinstance(error, TimeoutError):
                raise _busy() from None
            raise
        return room

    def _fits(self, room: Room) -> bool:
        return (
            self._total + room.size_bytes <= self._most and self._taken[room.who] + room.size_bytes <= self._most_each
        )

    def _enter(self, room: Room) -> None:
        self._total += room.size_bytes
        self._taken[room.who] += room.size_bytes

    def _give_back(self, room: Room, size_bytes: int) -> None:
        if size_bytes <= 0:
            return
        if room.size_bytes >= LARGE_BYTES:
            self._collect_soon()
        room.size_bytes -= size_bytes
        self._total -= size_bytes
        self._taken[room.who] -= size_bytes
        if not self._taken[room.who]:
            del self._taken[room.who]
        if self._waiting:
            self._let_in()

    def _collect_soon(self) -> None:
        if self._collecting is not None:
            self._collecting.cancel()
        self._collecting = asyncio.get_running_loop().call_later(COLLECT_AFTER_S, _return_memory)

    def _let_in(self) -> None:
        """Let in those who fit, in their order; a caller who has taken its share keeps nobody else waiting."""
        behind: set[str] = set()
        for waiting in [*self._waiting]:
            room = waiting.room
            if room.who in behind or waiting.granted.done() or not self._fits(room):
                behind.add(room.who)
                continue
            self._waiting.remove(waiting)
            self._enter(room)
            waiting.granted.set_result(None)


def _return_memory() -> None:
    gc.collect()
    host.release_free_memory()


def _busy() -> Problem:
    return Problem(
        429,
        "too_many_requests",
        "Too many large bodies are being worked on at once.",
        cure="Wait a moment, and send fewer large bodies at once.",
        headers={"Retry-After": "1"},
    )
