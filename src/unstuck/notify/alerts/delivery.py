"""What a target was sent and what comes next, as a state with pure transitions: nothing twice, nothing missed.

The position of a target is a cursor: everything up to it was told or is not to be told, apart from transactions that
were open. It moves on now and then; the events told since are kept one by one.
"""

from collections.abc import Sequence

import msgspec

from unstuck.config import Alerts
from unstuck.domain.event_cursor import Cursor, read_cursor
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.events import AlertEvent, EventKey
from unstuck.notify.alerts.conditions import events_of
from unstuck.notify.alerts.targets import read_targets

MOVE_S = 60.0
"""The position moves at most this often, unless much was told since: each move is a write."""
MANY_TOLD = 1_000
MAX_BATCH = 2_000
MAX_ERROR_CHARS = 300


class Delivery(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message that is on its way, or was when its sender was last heard of."""

    delivery: str
    events: tuple[EventKey, ...]
    at: float
    by: str
    until: float
    """After this whoever sends it is taken for dead."""
    tries: int = 1


class DeliveryState(msgspec.Struct, frozen=True, omit_defaults=True):
    """All that is known of one target."""

    told: tuple[EventKey, ...] = ()
    """Events behind the position that were told."""
    moved_at: float = 0.0
    """When the position moved."""
    sending: Delivery | None = None
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


def read_state(text: str) -> DeliveryState:
    """Understand what is stored; what only a newer version knows is passed over."""
    return msgspec.json.decode(text, type=DeliveryState)


def write_state(book: DeliveryState) -> str:
    return msgspec.json.encode(book).decode()


def begin(book: DeliveryState, sending: Delivery) -> DeliveryState:
    return msgspec.structs.replace(book, sending=sending)


def delivered(book: DeliveryState, now_at: float) -> DeliveryState:
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


def failed(book: DeliveryState, now_at: float, error: str, wait_s: float, *, maybe_arrived: bool) -> DeliveryState:
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
    book: DeliveryState, position: Cursor, untold: Sequence[EventKey], newest: Cursor, now_at: float
) -> tuple[Cursor, DeliveryState]:
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


def _reached(book: DeliveryState, position: Cursor, untold: Sequence[EventKey], newest: Cursor) -> Cursor:
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


LONGEST_WINDOWS = 10.0
"""While more keep coming the first one waits on, for so many windows at most."""
CLOCK_S = 60.0
"""An event from further ahead tells of a clock that was set back: nobody waits for that."""
FIRST_RETRY_S = 2.0
SLOWEST_RETRY_S = 300.0


class Wait(msgspec.Struct, frozen=True):
    """Nothing to tell now."""


class SendNow(msgspec.Struct, frozen=True):
    events: tuple[AlertEvent, ...]


class Resend(msgspec.Struct, frozen=True):
    """Somebody began to tell these, and nobody knows whether they arrived."""

    events: tuple[AlertEvent, ...]


Decision = Wait | SendNow | Resend


def plan(book: DeliveryState, untold: Sequence[AlertEvent], now_at: float, rules: Alerts, by: str) -> Decision:
    """`untold` are in the order of their ids. `by` is who asks, who is not sending anything to this target now."""
    if now_at < book.next_try_at <= now_at + SLOWEST_RETRY_S:
        return Wait()
    if book.sending is not None:
        theirs = book.sending.by != by and now_at < book.sending.until <= now_at + 10 * rules.send_timeout_s
        if theirs:
            return Wait()
        ids = frozenset(event_id for _, event_id, _ in book.sending.events)
        # What retention removed meanwhile, or is not to be told any more, is left out.
        again = tuple(event for event in untold if event.id in ids)
        return Resend(again)
    if not untold:
        return Wait()
    if book.told_at is not None and 0 <= now_at - book.told_at < rules.min_interval_s:
        return Wait()
    times = [event.at for event in untold]
    window_s = rules.batch_window_s
    # One that was written since we looked at the clock is the newest there can be.
    if -CLOCK_S <= now_at - max(times) < window_s and now_at - min(times) < window_s * LONGEST_WINDOWS:
        return Wait()
    return SendNow(tuple(untold[:MAX_BATCH]))


def retry_s(failures: int) -> float:
    """Give the wait after so many failures in a row."""
    return min(FIRST_RETRY_S * 2.0 ** min(max(failures - 1, 0), 20), SLOWEST_RETRY_S)


class TargetStatus(msgspec.Struct, frozen=True):
    """A target without its secrets."""

    target: str
    kind: str
    known: bool
    """A sender has met it; else it is told from when one does."""
    messages: int = 0
    told_at: float | None = None
    waiting: int = 0
    """Alerts that it was not told of yet."""
    failing_since: float | None = None
    failures: int = 0
    error: str = ""


def target_status(ledger: Ledger, rules: Alerts) -> list[TargetStatus]:
    kinds = events_of(rules.told_kinds)
    views = []
    for target in read_targets(rules):
        kind = "webhook" if target.is_webhook else "apprise"
        found = ledger.events.alert_target(target.fingerprint)
        if found is None:
            views.append(TargetStatus(target.shown, kind, False))
            continue
        book = read_state(found.state)
        waiting = len(ledger.events.for_alerts(kinds, read_cursor(found.position), book.told_ids, MAX_BATCH).events)
        views.append(
            TargetStatus(
                target.shown,
                kind,
                True,
                book.messages,
                book.told_at,
                waiting,
                book.failing_since,
                book.failures,
                book.error,
            )
        )
    return views
