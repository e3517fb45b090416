"""Remember what a target was told, so that nothing is told twice and nothing is missed.

Ids of events are given before their commits: a lower one may appear after a higher one was told. So the low mark, below
which everything is done, trails by a while, and the ids told above it are kept one by one.
"""

import msgspec

LOOK_BACK_S = 600.0
"""An event that appears so long after later ones would not be told. Commits of the ledger take milliseconds."""
MAX_TOLD = 5_000
MAX_BATCH = 2_000
MAX_ERROR_CHARS = 300


class Sending(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message that is on its way, or was when its sender was last heard of."""

    delivery: str
    ids: tuple[int, ...]
    at: float
    by: str
    until: float
    """After this whoever sends it is taken for dead."""
    tries: int = 1


class Mark(msgspec.Struct, frozen=True):
    """The newest id at some moment: all that is lower will have appeared a while later."""

    id: int
    at: float


class Book(msgspec.Struct, frozen=True, omit_defaults=True):
    """All that is known of one target."""

    told: tuple[int, ...] = ()
    """Ids above the low mark that were told."""
    mark: Mark | None = None
    sending: Sending | None = None
    told_at: float | None = None
    """When the last message arrived."""
    messages: int = 0
    failures: int = 0
    """In a row."""
    failing_since: float | None = None
    next_try_at: float = 0.0
    error: str = ""


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
        told=tuple(sorted({*book.told, *book.sending.ids})),
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


def advance(book: Book, low_id: int, first_untold_id: int | None, newest_id: int, now_at: float) -> tuple[int, Book]:
    """Raise the low mark where that is safe, and forget the ids below it."""
    highest = newest_id if first_untold_id is None else min(newest_id, first_untold_id - 1)
    mark = book.mark
    if mark is None or now_at < mark.at:
        # The second: the clock was set back. Better to trail for longer.
        mark = Mark(newest_id, now_at)
    elif now_at - mark.at >= LOOK_BACK_S:
        low_id = max(low_id, min(mark.id, highest))
        mark = Mark(newest_id, now_at)
    if len(book.told) > MAX_TOLD:
        low_id = max(low_id, min(book.told[-MAX_TOLD - 1], highest))
    return low_id, msgspec.structs.replace(book, told=tuple(one for one in book.told if one > low_id), mark=mark)
