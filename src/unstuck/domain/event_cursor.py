"""A position in the stream of events that survives reconnects and restarts.

On PostgreSQL an event gets its id before its transaction commits, so an event with a low id may appear long after one
with a higher id. Transaction ids are exact where event ids are not: a reader learns with each page which transactions
were still open, and those alone can bring events behind its position. A cursor is therefore the newest event that was
seen, in the order of transactions, and the transactions below it that were open then. How many events an open
transaction writes does not matter, and one that is rolled back simply ends.

On SQLite writes are serial: the id of an event is its transaction, and none is ever open.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

from unstuck.errors import ConfigError

MAX_OPEN = 50
"""Open transactions named in the text of a cursor. With more, the newest of them and all behind are told again."""
MAX_CHARS = 1_000
_MAX_NUMBER = 2**63 - 1
_ENDED = "end"


@dataclass(frozen=True)
class Cursor:
    transaction: int = 0
    id: int = 0
    stamp: int = 0
    """The time of this event in milliseconds. An id that was issued twice, before and after a failover, is told apart
    by it."""
    open: frozenset[int] = frozenset()
    """Transactions below this event that may still bring events."""
    begun: tuple[tuple[int, int], ...] = ()
    """Those of the open transactions of which some events were seen, and the ids up to which."""
    again_from: int | None = None
    """Everything from this transaction on counts as unseen."""
    ended: bool = False
    """The job that was followed has ended, and its end was told."""

    def __str__(self) -> str:
        if not self.id:
            return f"0.{_ENDED}" if self.ended else "0"
        begun = dict(self.begun)
        named = sorted(self.open)
        parts = [f"{self.id}.{self.transaction}.{self.stamp}"]
        for transaction in named[:MAX_OPEN]:
            seen = f"_{begun[transaction]}" if transaction in begun else ""
            parts.append(f"{self.transaction - transaction}{seen}")
        # In the place of all that are not named: the first of them stands for them and for all behind.
        again = named[MAX_OPEN] if len(named) > MAX_OPEN else self.again_from
        if again is not None:
            parts.append(f"from{self.transaction - again}")
        if self.ended:
            parts.append(_ENDED)
        return ".".join(parts)

    def is_behind(self, transaction: int, event_id: int) -> bool:
        """Return whether an event comes after this position: it has not been seen."""
        if transaction in self.open:
            return event_id > dict(self.begun).get(transaction, 0)
        return (transaction, event_id) > self.floor

    def names(self, transaction: int | None, at: float | None) -> bool:
        """Return whether the event that the ledger has under this id is the one that was seen."""
        return self.id == 0 or (at is not None and (self.transaction, self.stamp) == (transaction, stamp_of(at)))

    @property
    def floor(self) -> tuple[int, int]:
        """Everything up to this transaction and id was seen, apart from the open transactions."""
        return (self.transaction, self.id) if self.again_from is None else (self.again_from, 0)

    def is_ahead_of(self, other: "Cursor") -> bool:
        return (self.transaction, self.id) > (other.transaction, other.id)

    def resumed(self) -> "Cursor":
        """Return where reading goes on, once it is known that the ledger has this event."""
        if self.again_from is None:
            return replace(self, ended=False)
        low = frozenset(one for one in self.open if one < self.again_from)
        return Cursor(self.again_from, 0, 0, low, _within(self.begun, low))

    def after(self, transaction: int, event_id: int, at: float, running: Collection[int]) -> "Cursor":
        """Return the position behind the next event of a page, in the order of transactions and ids.

        `running` are the transactions that were open when the page was read.
        """
        if (transaction, event_id) > (self.transaction, self.id):
            low = frozenset(one for one in running if one < transaction and self.is_behind(one, _MAX_NUMBER))
            return Cursor(transaction, event_id, stamp_of(at), low)
        left = frozenset(one for one in self.open if one >= transaction or one in running)
        begun = tuple(sorted({**dict(self.begun), transaction: event_id}.items()))
        return replace(self, open=left, begun=_within(begun, left))

    def settled(self, running: Collection[int]) -> "Cursor":
        """Return the position behind a page that held all there was: what is not running any more brings nothing."""
        left = self.open.intersection(running)
        return replace(self, open=left, begun=_within(self.begun, left))


def _within(begun: tuple[tuple[int, int], ...], opened: frozenset[int]) -> tuple[tuple[int, int], ...]:
    return tuple(one for one in begun if one[0] in opened)


def stamp_of(at: float) -> int:
    return int(at * 1_000)


def read_cursor(text: str) -> Cursor:
    """Parse what `str` made, as a client sends it back."""
    if len(text) > MAX_CHARS:
        raise _refused(text)
    parts = text.strip().split(".")
    ended = parts[-1] == _ENDED
    if ended:
        parts.pop()
    if parts == ["0"]:
        return Cursor(ended=ended)
    again = _number(text, parts.pop().removeprefix("from")) if parts and parts[-1].startswith("from") else None
    if not 3 <= len(parts) <= MAX_OPEN + 3:
        raise _refused(text)
    event_id, transaction, stamp = (_number(text, part) for part in parts[:3])
    opened: set[int] = set()
    begun: dict[int, int] = {}
    for part in parts[3:]:
        below, _, up_to = part.partition("_")
        opened.add(transaction - _number(text, below))
        if up_to:
            begun[transaction - _number(text, below)] = _number(text, up_to)
    low = frozenset(one for one in opened if 0 < one < transaction)
    return Cursor(
        transaction,
        event_id,
        stamp,
        low,
        _within(tuple(sorted(begun.items())), low),
        None if again is None else max(0, transaction - again),
        ended,
    )


def _number(text: str, part: str) -> int:
    if not (part.isascii() and part.isdigit() and len(part) < 20 and int(part) <= _MAX_NUMBER):
        raise _refused(text)
    return int(part)


def _refused(text: str) -> ConfigError:
    return ConfigError(
        f"{text[:80]!r} is not a position in the stream of events. Send back the cursor of the last event unchanged."
    )
