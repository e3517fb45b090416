"""Decide when a target is told, and of what: many at once become one message, and messages keep their distance."""

from collections.abc import Sequence

import msgspec

from unstuck.config import Alerts
from unstuck.notify.alerts.bookkeeping import MAX_BATCH, Book
from unstuck.store.records import AlertEvent

LONGEST_WINDOWS = 10.0
"""While more keep coming the first one waits on, for so many windows at most."""
CLOCK_S = 60.0
"""An event from further ahead tells of a clock that was set back: nobody waits for that."""
FIRST_RETRY_S = 2.0
SLOWEST_RETRY_S = 300.0


class Wait(msgspec.Struct, frozen=True):
    """Nothing to tell now."""


class Tell(msgspec.Struct, frozen=True):
    events: tuple[AlertEvent, ...]


class TellAgain(msgspec.Struct, frozen=True):
    """Somebody began to tell these, and nobody knows whether they arrived."""

    events: tuple[AlertEvent, ...]


Decision = Wait | Tell | TellAgain


def decide(book: Book, untold: Sequence[AlertEvent], now_at: float, rules: Alerts, by: str) -> Decision:
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
        return TellAgain(again)
    if not untold:
        return Wait()
    if book.told_at is not None and 0 <= now_at - book.told_at < rules.min_interval_s:
        return Wait()
    times = [event.at for event in untold]
    window_s = rules.batch_window_s
    # One that was written since we looked at the clock is the newest there can be.
    if -CLOCK_S <= now_at - max(times) < window_s and now_at - min(times) < window_s * LONGEST_WINDOWS:
        return Wait()
    return Tell(tuple(untold[:MAX_BATCH]))


def retry_s(failures: int) -> float:
    """Give the wait after so many failures in a row."""
    return min(FIRST_RETRY_S * 2.0 ** min(max(failures - 1, 0), 20), SLOWEST_RETRY_S)
