"""Pass cursors of the event stream to SQL, and read them from it."""

from collections.abc import Sequence
from typing import Any

from unstuck.domain.cursor import Cursor, stamp_of
from unstuck.store.postgres import arrays


def cursor_values(cursor: Cursor) -> dict[str, Any]:
    """Return the parameters of a statement that reads what is behind this position."""
    transaction, event_id = cursor.floor
    return {
        "origin": cursor.id,
        "transaction": str(transaction),
        "id": event_id,
        "open": arrays.texts([str(one) for one in sorted(cursor.open)]),
        "begun": arrays.texts([str(one) for one, _ in cursor.begun]),
        "begun_up_to": arrays.int8s([event_id for _, event_id in cursor.begun]),
    }


def newest_cursor_of(event_id: int | None, transaction: int | None, at: float | None, running: Sequence[int]) -> Cursor:
    """Return the position behind the newest event, of a row of `newest_event`."""
    if event_id is None or transaction is None or at is None:
        return Cursor()
    return Cursor(transaction, event_id, stamp_of(at), frozenset(one for one in running if one < transaction))
