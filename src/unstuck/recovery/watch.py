"""Know how long this reaper itself was awake and in touch with the ledger: a reaper that slept accuses no one."""

import math

from unstuck.domain.watch_clock import Cause, Tick, slack_s

LATE_AT_LEAST_S = 1.0
"""A round that is late by less than this is an ordinary one on a busy machine."""
BUSY_AT_MOST_S = 2.0
"""How much of the time that a round took is claimed: it made calls all along, but one of them may have hung."""


class ReaperWatch:
    """A reaper's record of its own contacts. Times are boot-time seconds, given by the caller."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._cause: Cause | None = Cause.START
        self._ticked_s: float | None = None
        self._stale_s = 0.0
        self._seen_at: float | None = None
        self._in_touch_since_s = 0.0
        self._reached_s = self._rested_s = 0.0
        self._planned_s = every_s
        # A reaper that just started has lost no connection of its own.
        self._steady_since_s: float | None = -math.inf
        self._connected_since_s: float | None = -math.inf
        self.awake = False
        """Whether the present round came on time and the ledger answered before: else it accuses no one."""

    def tick(self, now_s: float, interval_s: float) -> Tick:
        """Return what to say to the ledger in a contact that begins now.

        `interval_s` is the shortest heartbeat interval of the fleet. A claim is at most half of it: any living worker
        can be late by that much."""
        spare_s = slack_s(interval_s)
        every_s = min(self._every_s, interval_s / 2)
        if self._ticked_s is None:
            self.awake = self._cause is Cause.START
            return Tick(None, every_s, spare_s, self._cause)
        idle_s = now_s - self._rested_s
        allowed_s = self._planned_s + max(spare_s, LATE_AT_LEAST_S)
        self.awake = idle_s <= allowed_s
        if not self.awake:
            self._steady_since_s = None
        busy_s = min(self._rested_s - self._ticked_s, BUSY_AT_MOST_S)
        claim_s = min(busy_s + min(idle_s, allowed_s), interval_s / 2) + self._stale_s
        # Others may have kept the watch before our own first contact, or an outage may have ended just then.
        claim_s = min(claim_s, now_s - self._in_touch_since_s)
        cause = None if self.awake else Cause.PAUSE
        return Tick(claim_s, every_s, spare_s, cause, since_s=now_s - self._ticked_s, seen_at=self._seen_at)

    def tick_amid(self, now_s: float, interval_s: float) -> Tick:
        """Return what to say in a contact in the middle of a round, which changes nothing of how it came to this round.

        A part of a round that takes long is work, not a pause."""
        awake, steady_since_s = self.awake, self._steady_since_s
        self._rested_s = now_s
        said = self.tick(now_s, interval_s)
        self.awake, self._steady_since_s = awake, steady_since_s
        return said

    def since_contact_s(self, now_s: float) -> float | None:
        """Return how long ago the last tick that was answered was sent; None if it is out of touch."""
        return None if self._ticked_s is None else now_s - self._ticked_s

    def reached(
        self, sent_s: float, now_s: float, *, stale_s: float, connected_s: float, at: float | None = None
    ) -> None:
        """Note that the ledger answered a tick sent at `sent_s`.

        `stale_s` is how long ago the watch was last extended, `connected_s` the age of the connection, `at` what the
        ledger's clock said."""
        reconnected = self._ticked_s is not None and now_s - connected_s > self._reached_s
        if self._steady_since_s is None or reconnected:
            self._steady_since_s = now_s
        if self._connected_since_s is None or reconnected:
            self._connected_since_s = now_s
        if self._ticked_s is None:
            self._in_touch_since_s = sent_s
        self._ticked_s = sent_s
        self._reached_s = self._rested_s = now_s
        self._planned_s = self._every_s
        self._stale_s = stale_s
        self._seen_at = at

    def rest(self, now_s: float, planned_s: float) -> None:
        """Note that a round ended well and that the next contact is due after `planned_s`."""
        self._rested_s = now_s
        self._planned_s = planned_s

    def lost(self) -> None:
        """Note that the ledger does not answer."""
        self._ticked_s = None
        self._cause = Cause.OUTAGE
        self._steady_since_s = self._connected_since_s = None

    def steady_s(self, now_s: float) -> float:
        """Return how long ago its last pause, outage or lost connection ended; infinite if there was none."""
        return 0.0 if self._steady_since_s is None else now_s - self._steady_since_s

    def connected_s(self, now_s: float) -> float:
        """Return how long ago its last outage or lost connection ended; infinite if there was none."""
        return 0.0 if self._connected_since_s is None else now_s - self._connected_since_s
