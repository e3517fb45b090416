"""Say how the targets are doing: when each was told last, and since when it fails."""

import msgspec

from unstuck.config import Alerts
from unstuck.domain.cursor import read_cursor
from unstuck.notify.alerts.bookkeeping import MAX_BATCH, read_book
from unstuck.notify.alerts.kinds import events_of
from unstuck.notify.alerts.targets import read_targets
from unstuck.store.contract import Ledger


class TargetView(msgspec.Struct, frozen=True):
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


def look_at_targets(ledger: Ledger, rules: Alerts) -> list[TargetView]:
    kinds = events_of(rules.told_kinds)
    views = []
    for target in read_targets(rules):
        kind = "webhook" if target.is_webhook else "apprise"
        found = ledger.alert_target(target.fingerprint)
        if found is None:
            views.append(TargetView(target.shown, kind, False))
            continue
        book = read_book(found.state)
        waiting = len(ledger.events_to_tell(kinds, read_cursor(found.position), book.told_ids, MAX_BATCH).events)
        views.append(
            TargetView(
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
