"""Remember what a target was told, so that nothing is told twice and nothing is missed.

The position of a target is a cursor: everything up to it was told or is not to be told, apart from transactions that
were open. It moves on now and then; the events told since are kept one by one.
"""

from collections.abc import Sequence

import msgspec

from unstuck.domain.cursor import Cursor
from unstuck.store.records import EventKey

MOVE_S = 60.0
"""The position moves at most this often, unless much was told since: each move is a write."""
MANY_TOLD = 1_000
MAX_BATCH = 2_000
MAX_ERROR_CHARS = 300


class Sending(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message that is on its way, or was when its sender was last heard of."""

    delivery: str
    events: tuple[EventKey, ...]
    at: float
    by: str
    until: float
    """After this whoever sends it is taken for dead."""
    tries: int = 1


class Book(msgspec.Struct, frozen=True, omit_defaults=True):
    """All that is known of one target."""

    told: tuple[EventKey, ...] = ()
    """Events behind the position that were told."""
    moved_at: float = 0.0
    """When the position moved."""
    sending: Sending | None = None
    told_at: float | None = None
    """When the last message arrived."""
    messages: int = 0
    failures: int = 0
    """In a row."""
    failing_since: float | None = None
    next_try_at: float = 0.0
    error: str = ""

    @property
    def told_ids(self) -> list[int]:
        return [event_id for _, event_id, _ in self.told]


def read_book(text: str) -> Book:
    """Understand what is stored; what only a newer version knows is passed over."""
    return msgspec.json.decode(text, type=Book)


def write_book(book: Book) -> str:
    return msgspec.json.encode(book).decode()


def begin(book: Book, sending: Sending) -> Book:
    return msgspec.structs.replace(book, sending=sending)


def arrived(book: Book, now_at: float) -> Book:
    """Note that what was on its way is told."""
    assert book.sending is not None
    return msgspec.structs.replace(
        book,
        told=tuple(sorted({*book.told, *book.sending.events})),
        sending=None,
        told_at=now_at,
        messages=book.messages + 1,
        failures=0,
        failing_since=None,
        next_try_at=0.0,
        error="",
    )


def failed(book: Book, now_at: float, error: str, wait_s: float, *, maybe_arrived: bool) -> Book:
    """Note a failure. What may have arrived keeps its delivery id; what has not is gathered with what comes later."""
    assert book.sending is not None
    return msgspec.structs.replace(
        book,
        # Its sender has let go of it: whoever comes next need not wait for it.
        sending=msgspec.structs.replace(book.sending, until=now_at) if maybe_arrived else None,
        failures=book.failures + 1,
        failing_since=now_at if book.failing_since is None else book.failing_since,
        next_try_at=now_at + wait_s,
        error=error[:MAX_ERROR_CHARS],
    )


def advance(
    book: Book, position: Cursor, untold: Sequence[EventKey], newest: Cursor, now_at: float
) -> tuple[Cursor, Book]:
    """Move the position on if that is due, and forget what was told before it.

    `newest` was read together with the book, and before the untold events were. Of those there may be more if there
    are MAX_BATCH."""
    recently = 0.0 <= now_at - book.moved_at < MOVE_S
    if recently and len(book.told) < MANY_TOLD:
        return position, book
    reached = _reached(book, position, untold, newest)
    if reached == position:
        return position, book
    told = tuple(key for key in book.told if reached.id and reached.is_behind(*key[:2]))
    return reached, msgspec.structs.replace(book, told=told, moved_at=now_at)


def _reached(book: Book, position: Cursor, untold: Sequence[EventKey], newest: Cursor) -> Cursor:
    """Return the position up to which everything was told."""
    # What was committed after `newest` was read is behind it, whatever stands before or after it in the order.
    first = next((key for key in untold if not newest.is_behind(*key[:2])), None)
    if first is None and len(untold) >= MAX_BATCH:
        first = untold[0]
    if first is None:
        # All that could be seen then; if retention left no event at all, everything from now on is news.
        return position if newest.id and position.is_ahead_of(newest) else newest
    before = [key for key in book.told if position.floor < key[:2] < first[:2]]
    if not before:
        return position
    transaction, event_id, stamp = max(before)
    still_open = frozenset(one for one in newest.open if one < transaction)
    return Cursor(transaction, event_id, stamp, still_open)
