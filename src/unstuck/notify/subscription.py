"""What one reader gets: a choice of the feed from a place on, with bursts gathered; or the life of one job."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from unstuck.domain.events import Event, EventKind, gathered
from unstuck.notify.cursor import Cursor
from unstuck.notify.feed import PAGE, Feed, Wake, event_of
from unstuck.notify.following import Follower
from unstuck.store.contract import Ledger

MAX_BEHIND = 10_000
"""Whoever missed more than this is told so, and goes on with what is new."""
LONGEST_BURST_S = 10.0
IDLE_S = 15.0
FOLLOW_S = 0.25


@dataclass(frozen=True)
class Choice:
    """Which events a reader wants; empty means all."""

    kinds: frozenset[str] = frozenset()
    worker_id: str | None = None

    def wants(self, event: Event) -> bool:
        return (not self.kinds or event.kind in self.kinds) and (
            self.worker_id is None or event.worker_id == self.worker_id
        )


class Reading(Protocol):
    """How a reader reads, whatever it listens to: call `take` when woken, and at the latest after `patience_s`."""

    cursor: str
    """Where a reader stands that got nothing yet."""

    @property
    def patience_s(self) -> float: ...

    @property
    def over(self) -> bool:
        """Nothing more will come."""
        ...

    def take(self) -> list[Event]:
        """Give what is new, in order. Blocks for the ledger alone."""
        ...

    def close(self) -> None: ...


class JobSubscription:
    """The life of one job, from a place on or from its beginning: what the ledger wrote of it, and what goes well."""

    def __init__(self, ledger: Callable[[], Ledger], job_id: int, kinds: frozenset[str], after: Cursor | None) -> None:
        self._ledger = ledger
        self._job_id = job_id
        self._choice = Choice(kinds)
        self._at = 0 if after is None else after.at
        self._follower = Follower([job_id])
        self.cursor = str(self._at)
        self.patience_s = FOLLOW_S

    @property
    def over(self) -> bool:
        return self._follower.over

    def take(self) -> list[Event]:
        ledger = self._ledger()
        # Looked at first: the end of a job and its event are one commit, so the event is found below.
        seen = self._follower.look(ledger, time.time())
        events: list[Event] = []
        while True:
            page = ledger.events(job_id=self._job_id, after_id=self._at, limit=PAGE)
            for record in page:
                self._at = record.id
                events.append(event_of(record, str(self._at)))
            if len(page) < PAGE:
                break
        cursor = str(self._at)
        events += [msgspec.structs.replace(event, cursor=cursor) for event in seen]
        return [event for event in events if self._choice.wants(event)]

    def close(self) -> None: ...


class Subscription:
    """The feed of everything, from a place on or from now."""

    def __init__(
        self,
        feed: Feed,
        ledger: Callable[[], Ledger],
        wake: Wake,
        choice: Choice,
        after: Cursor | None = None,
        gather_s: float = 0.0,
    ) -> None:
        self._feed = feed
        self._ledger = ledger
        self._wake = wake
        self._choice = choice
        self._gather_s = gather_s
        self._waiting: list[Event] = []
        self._first_s = self._last_s = 0.0
        self._offset, joined = feed.join(wake)
        self._after = after or joined
        self._missed = [] if after is None else self._catch_up(after, joined)
        self.cursor = str(joined if after is None else after)
        """Where a reader that got nothing yet stands."""

    def close(self) -> None:
        self._feed.leave(self._wake)

    @property
    def patience_s(self) -> float:
        """How long to wait for a wake before looking all the same."""
        if self._waiting:
            return max(0.01, self._due_s() - time.monotonic())
        return IDLE_S

    @property
    def over(self) -> bool:
        return False

    def take(self) -> list[Event]:
        """Give what is new, in order; a burst is held back until it is over and given as one."""
        events = self._missed
        self._missed = []
        fresh, self._offset, lost = self._feed.pull(self._offset)
        if lost:
            events.append(_gap(lost, fresh[0].cursor if fresh else ""))
        events += [event for event in fresh if event.id is not None and self._after.is_behind(event.id)]
        wanted = self._choice.wants
        return self._gather([event for event in events if event.kind == EventKind.GAP or wanted(event)])

    def _gather(self, events: list[Event]) -> list[Event]:
        if self._gather_s <= 0:
            return events
        now_s = time.monotonic()
        if events:
            if not self._waiting:
                self._first_s = now_s
            self._last_s = now_s
            self._waiting += events
        if not self._waiting or now_s < self._due_s():
            return []
        burst, self._waiting = self._waiting, []
        return gathered(burst)

    def _due_s(self) -> float:
        return min(self._last_s + self._gather_s, self._first_s + LONGEST_BURST_S)

    def _catch_up(self, after: Cursor, joined: Cursor) -> list[Event]:
        """Read from the ledger what came between the reader's place and ours."""
        found: list[Event] = []
        at, place = after.lowest, after
        while len(found) <= MAX_BEHIND:
            page = self._ledger().events(worker_id=self._choice.worker_id, after_id=at, limit=PAGE)
            for record in page:
                if after.is_behind(record.id) and not joined.is_behind(record.id):
                    place = Cursor(max(place.at, record.id), place.holes - {record.id})
                    found.append(event_of(record, str(place)))
            if len(page) < PAGE or page[-1].id > joined.at:
                return found
            at = page[-1].id
        return [_gap(len(found), str(joined))]


def _gap(missed: int, cursor: str) -> Event:
    message = f"At least {missed} events were passed over: this reader was away or too slow"
    return Event(EventKind.GAP, time.time(), message, cursor=cursor, count=missed)
