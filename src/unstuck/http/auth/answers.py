"""Bound what answers take of the memory until their clients have read them.

An answer that finds no room is thrown away, and made again when there is room: requests that wait hold nothing. A claim
cannot be made again, so it takes room before it claims. Small answers are not counted: the buffer of a connection may
hold as much.
"""

import asyncio

from starlette.types import Message, Send

from unstuck import failpoints
from unstuck.http.auth.memory_budget import MemoryBudget, Room

ANSWERS_BYTES = 64 * 1024 * 1024
ANSWERS_BYTES_EACH = 32 * 1024 * 1024
"""Of one caller."""
SMALL_BYTES = 64 * 1024
PIECE_BYTES = 256 * 1024
CLAIM_BYTES = 1024 * 1024
"""What a claim counts for until its answer is made, if the caller's last one was not larger."""
MAX_REMEMBERED = 10_000


class AnswerBudget:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self.memory = MemoryBudget(ANSWERS_BYTES, ANSWERS_BYTES_EACH, "answers that were not read yet")
        self._claims: dict[str, int] = {}

    def claim_bytes(self, who: str) -> int:
        """Return how large the answer to a claim of this caller may be, by the last one."""
        return self._claims.get(who, CLAIM_BYTES)

    def note_claim(self, who: str, size_bytes: int) -> None:
        """Remember the size of an answer to a claim."""
        if size_bytes <= CLAIM_BYTES:
            self._claims.pop(who, None)
            return
        if len(self._claims) >= MAX_REMEMBERED:
            self._claims.clear()
        self._claims[who] = size_bytes


class AnswerRoom:
    """What the answer to one request takes. Leaving the context releases it."""

    def __init__(self, budget: AnswerBudget, who: str) -> None:
        self._budget = budget
        self._who = who
        self._room: Room | None = None
        self._is_claim = False

    def __enter__(self) -> "AnswerRoom":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()

    async def take(self, size_bytes: int) -> None:
        """Take room, waiting for it if need be; raise the problem if that takes too long."""
        if not self.try_take(size_bytes):
            if failpoints.active:
                failpoints.reached("http.answer_waiting")
            self._room = await self._budget.memory.take(self._who, size_bytes)

    def try_take(self, size_bytes: int) -> bool:
        """Take room if there is some now, and return whether there was."""
        if self._room is None:
            self._room = self._budget.memory.try_take(self._who, size_bytes)
        return self._room is not None

    async def take_for_claim(self) -> None:
        """Take room for the jobs of a claim, waiting for it if need be."""
        self._is_claim = True
        await self.take(self._budget.claim_bytes(self._who))

    def try_take_for_claim(self) -> bool:
        """Take room for the jobs of a claim if there is some now."""
        self._is_claim = True
        return self.try_take(self._budget.claim_bytes(self._who))

    def settle(self, size_bytes: int) -> None:
        """Count what the answer really takes: nothing if it is small."""
        if self._is_claim:
            self._budget.note_claim(self._who, size_bytes)
        if size_bytes < SMALL_BYTES:
            self.release()
        elif self._room is not None:
            self._room.resize(size_bytes)
        else:
            # It cannot be made again: it is counted, whether there is room or not.
            self._room = Room(self._budget.memory, self._who, 0)
            self._room.resize(size_bytes)

    def release(self) -> None:
        """Give the room back; a second time does nothing."""
        if self._room is not None:
            self._room.release()
            self._room = None


class AnswerSender:
    """Sends the answer to a request, if there is room for it."""

    def __init__(self, send: Send, room: AnswerRoom, *, may_repeat: bool) -> None:
        self._send = send
        self._room = room
        self._may_repeat = may_repeat
        self._is_large = False
        self.dropped_bytes = 0
        """The size of the answer, if it was thrown away for want of room."""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._begin(_content_length(message))
        if self.dropped_bytes:
            return
        if self._is_large and message["type"] == "http.response.body":
            await self._send_in_pieces(message.get("body", b""), more_body=message.get("more_body", False))
        else:
            await self._send(message)

    def _begin(self, size_bytes: int) -> None:
        self._is_large = size_bytes >= SMALL_BYTES
        if self._is_large and self._may_repeat and not self._room.try_take(size_bytes):
            self.dropped_bytes = size_bytes
        else:
            self._room.settle(size_bytes)

    async def _send_in_pieces(self, body: bytes, *, more_body: bool) -> None:
        """Return when the client has read nearly all of it: a server sends no more while its buffer is full."""
        for start in range(0, len(body), PIECE_BYTES):
            piece = body[start : start + PIECE_BYTES]
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
            # What was written goes out in the next round of the loop; only then is it known whether the buffer is full.
            await asyncio.sleep(0)
        await self._send({"type": "http.response.body", "body": b"", "more_body": more_body})


def _content_length(message: Message) -> int:
    """Return how long an answer is; 0 for a stream, whose pieces are sent one by one."""
    for name, value in message.get("headers", ()):
        if name.lower() == b"content-length":
            return int(value)
    return 0
