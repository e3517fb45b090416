"""Follow events by a filter, or follow single jobs."""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from unstuck.domain.event_cursor import Cursor
from unstuck.domain.events import Event, EventKind, gathered
from unstuck.domain.states import FINAL_STATES, JobState
from unstuck.errors import LedgerUnavailable
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.jobs import JobPosition, Progress
from unstuck.notify.feed import PAGE, UNKNOWN, EventFeed, Wake, event_of, gap

_KINDS = {
    JobState.PENDING: EventKind.ENQUEUED,
    JobState.CLAIMED: EventKind.CLAIMED,
    JobState.RUNNING: EventKind.RUNNING,
    JobState.SUCCEEDED: EventKind.SUCCEEDED,
}
"""What else becomes of a job is written in the ledger, with their causes."""


class JobPoller:
    """Sees the changes of some jobs from look to look; may miss a state that lasted shorter than that."""

    def __init__(self, job_ids: Collection[int]) -> None:
        self._job_ids = frozenset(job_ids)
        self._seen: dict[int, tuple[JobState, int]] = {}
        self._told: dict[int, tuple[float | None, float | None, str]] = {}

    def look(self, ledger: Ledger, now: float) -> list[Event]:
        """Give what changed since the last look; at first, where the jobs stand."""
        glances = ledger.jobs.positions(self._job_ids)
        running = [position.job_id for position in glances if position.state is JobState.RUNNING]
        progress = ledger.jobs.progress(running) if running else {}
        events = []
        for position in glances:
            event = self._change(position, now)
            if event is not None:
                events.append(event)
            note = progress.get(position.job_id)
            if note is not None and note.token == position.token:
                events += self._progress(note, position)
        return events

    @property
    def over(self) -> bool:
        """Every job that exists has ended."""
        return bool(self._seen) and all(state in FINAL_STATES for state, _ in self._seen.values())

    def _change(self, position: JobPosition, now: float) -> Event | None:
        standing = (position.state, position.attempt)
        before = self._seen.get(position.job_id)
        if before == standing:
            return None
        self._seen[position.job_id] = standing
        kind = _KINDS.get(position.state)
        if kind is None or (before is not None and position.state is JobState.PENDING):
            return None  # Back in the queue, or ended badly: the ledger's own event says why.
        return Event(kind, now, _MESSAGES[kind].format(position.attempt), None, position.job_id, position.worker_id)

    def _progress(self, note: Progress, position: JobPosition) -> list[Event]:
        said = (note.done, note.total, note.message)
        if (note.done is None and not note.message) or self._told.get(note.job_id) == said:
            return []
        self._told[note.job_id] = said
        text = note.message or _share(note)
        return [
            Event(
                EventKind.PROGRESS,
                note.at,
                text,
                None,
                note.job_id,
                position.worker_id,
                done=note.done,
                total=note.total,
            )
        ]


def _share(note: Progress) -> str:
    return f"{note.done:g}" if note.total is None else f"{note.done:g} of {note.total:g}"


_MESSAGES = {
    EventKind.ENQUEUED: "It waits to be taken",
    EventKind.CLAIMED: "Claimed for try {}",
    EventKind.RUNNING: "Try {} began",
    EventKind.SUCCEEDED: "Succeeded on try {}",
}


MAX_BEHIND = 10_000
"""Whoever missed more than this is told so, and goes on with what is new."""
MAX_LOOKED_AT = 100_000
"""The same for one who chose few of many: so many are looked through for it."""
LONGEST_BURST_S = 10.0
IDLE_S = 15.0
FOLLOW_S = 0.25


@dataclass(frozen=True)
class EventFilter:
    """Which events a reader wants; empty means all."""

    kinds: frozenset[str] = frozenset()
    worker_id: str | None = None

    def wants(self, event: Event) -> bool:
        return (not self.kinds or event.kind in self.kinds) and (
            self.worker_id is None or event.worker_id == self.worker_id
        )


class EventSource(Protocol):
    """How a reader reads, whatever it listens to: call `take` when woken, and at the latest after `patience_s`."""

    cursor: str
    """Where a reader stands that got all that was handed out."""

    @property
    def max_wait_s(self) -> float: ...

    @property
    def is_finished(self) -> bool:
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
        self._choice = EventFilter(kinds)
        self._after = after
        self._at = Cursor() if after is None else after.resumed()
        self._follower = JobPoller([job_id])
        self._written: list[Event] = []
        self._steps: list[Event] = []
        self._met = self._complete = False
        self.cursor = str(self._at)
        self.max_wait_s = FOLLOW_S

    @property
    def is_finished(self) -> bool:
        return self._complete and self._follower.over

    def is_told(self) -> bool:
        """The reader comes back and knows the end of the job already: nothing was written of it since."""
        if self._after is None or not self._after.ended:
            return False
        ledger = self._ledger()
        ended = all(position.state in FINAL_STATES for position in ledger.jobs.positions([self._job_id]))
        page = ledger.events.since(self._after, job_id=self._job_id, limit=1)
        return ended and page.is_known and not page.events

    def take(self) -> list[Event]:
        try:
            self._look(self._ledger())
        except LedgerUnavailable:
            if not self._met:
                raise
            # It comes back, and so do we: what was found meanwhile is kept.
            return []
        self._met = True
        self.cursor = str(replace(self._at, ended=self.is_finished))
        events = self._written + [msgspec.structs.replace(event, cursor=str(self._at)) for event in self._steps]
        self._written, self._steps = [], []
        return [event for event in events if self._choice.wants(event)]

    def _look(self, ledger: Ledger) -> None:
        self._complete = False
        # Looked at first: the end of a job and its event are one commit, so the event is found below.
        self._steps += self._follower.look(ledger, time.time())
        while True:
            page = ledger.events.since(self._after or self._at, job_id=self._job_id, limit=PAGE)
            if self._after is not None and not page.is_known:
                # Its whole life once more: whoever comes back from nowhere must still hear how it ended.
                self._written.append(gap(UNKNOWN, "0"))
                self._after, self._at = None, Cursor()
                continue
            self._after = None
            for record in page.events:
                self._at = self._at.after(record.transaction, record.id, record.at, page.running)
                self._written.append(event_of(record, str(self._at)))
            if len(page.events) < PAGE:
                break
        self._at = self._at.settled(page.running)
        self._complete = True

    def close(self) -> None: ...


class FeedSubscription:
    """The feed of everything, from a place on or from now."""

    def __init__(
        self,
        feed: EventFeed,
        ledger: Callable[[], Ledger],
        wake: Wake,
        choice: EventFilter,
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
        self._offset, joined = feed.subscribe(wake)
        try:
            self._after, self._missed = (joined, []) if after is None else self._catch_up(after, joined)
        except BaseException:
            # Nobody will close what was never made.
            self.close()
            raise
        # Both are true for this reader. The feed's own is further on if it chose what seldom happens.
        self._pulled = str(joined if joined.is_ahead_of(self._after) else self._after)
        """The place behind all that was pulled from the feed; some of it may wait to be gathered."""
        self.cursor = str(joined if after is None else after)
        """The place behind all that was handed out, and all that this reader did not choose."""

    def close(self) -> None:
        self._feed.unsubscribe(self._wake)

    @property
    def max_wait_s(self) -> float:
        """How long to wait for a wake before looking all the same."""
        if self._waiting:
            return max(0.01, self._due_s() - time.monotonic())
        return IDLE_S

    @property
    def is_finished(self) -> bool:
        return False

    def take(self) -> list[Event]:
        """Give what is new, in order; a burst is held back until it is over and given as one."""
        events = self._missed
        self._missed = []
        fresh, self._offset, lost = self._feed.read(self._offset)
        if lost:
            # Its place is the one before: what comes behind the gap is not handed out yet.
            events.append(gap(f"At least {lost} events were passed over: {_SLOW}", self._pulled, lost))
        for transaction, event in fresh:
            if event.id is None:
                # A gap for everyone: what this reader had seen says nothing about the history that follows.
                self._after = Cursor()
            elif not self._after.is_behind(transaction, event.id):
                continue
            self._pulled = event.cursor
            if event.kind == EventKind.GAP or self._choice.wants(event):
                events.append(event)
        told = self._gather(events)
        if not self._waiting:
            self.cursor = self._pulled
        return told

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
        burst, self._waiting = gathered(self._waiting), []
        # They stand for each other's past and future: who is cut off among them hears all of them again.
        places = [self.cursor] * (len(burst) - 1) + [self._pulled]
        return [msgspec.structs.replace(event, cursor=place) for event, place in zip(burst, places, strict=True)]

    def _due_s(self) -> float:
        return min(self._last_s + self._gather_s, self._first_s + LONGEST_BURST_S)

    def _catch_up(self, after: Cursor, joined: Cursor) -> tuple[Cursor, list[Event]]:
        """Read from the ledger what is behind the reader's position; return from where on the rest is news."""
        found: list[Event] = []
        origin, at = after, after.resumed()
        looked = 0
        while len(found) <= MAX_BEHIND and looked <= MAX_LOOKED_AT:
            page = self._ledger().events.since(origin, worker_id=self._choice.worker_id, limit=PAGE)
            if not page.is_known:
                if after.is_ahead_of(joined):
                    # Of another ledger, or of this one before it was restored: events so high may never come.
                    return joined, [gap(UNKNOWN, str(joined))]
                if not found or found[0].kind != EventKind.GAP:
                    found.insert(0, gap(UNKNOWN, str(after)))
            for record in page.events:
                at = at.after(record.transaction, record.id, record.at, page.running)
                event = event_of(record, str(at))
                if self._choice.wants(event):
                    found.append(event)
            origin = at
            if len(page.events) < PAGE:
                return at.settled(page.running), found
            looked += len(page.events)
        missed = max(1, len(found))
        return joined, [gap(f"At least {missed} events were passed over: {_SLOW}", str(joined), missed)]


_SLOW = "this reader was away or too slow"
