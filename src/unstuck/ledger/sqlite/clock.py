"""Measure how long a worker has been silent."""

import math
import time
from dataclasses import dataclass

import apsw

from unstuck import host
from unstuck.domain.watch_clock import Period, watched_s
from unstuck.ledger.sqlite.database import fetch


@dataclass(frozen=True)
class Clock:
    """One instant, by all the clocks that the ledger knows, with the watch periods up to it."""

    at: float
    """Wall clock."""
    boot_s: float
    boot_id: str
    periods: tuple[Period, ...] = ()

    def counted_s(self, beat_at: float | None) -> float:
        """Return the silence that counts against a worker: the watched time since its last heartbeat."""
        return math.inf if beat_at is None else watched_s(self.periods, beat_at)

    def silent_s(self, beat_at: float | None) -> float:
        """Return the silence to show: as if the watch went on until now."""
        if beat_at is None:
            return math.inf
        until = self.periods[-1].until if self.periods else beat_at
        return self.counted_s(beat_at) + max(0.0, self.at - max(until, beat_at))

    def since_s(self, beat_at: float | None) -> float:
        """Return the plain time since the last heartbeat."""
        return math.inf if beat_at is None else self.at - beat_at

    def running_s(self, boot_id: str | None, started_boot_s: float | None, started_at: float | None) -> float:
        if started_boot_s is None or started_at is None:
            return 0.0
        return max(self.boot_s - started_boot_s if boot_id == self.boot_id else self.at - started_at, 0.0)


def read_clock(cursor: apsw.Cursor | None = None) -> Clock:
    """Return now; with a cursor, the watch periods with it."""
    periods = () if cursor is None else tuple(Period(*row) for row in fetch(cursor, "watch_periods"))
    return Clock(time.time(), host.boottime_s(), host.boot_id(), periods)
