"""Say for how long a worker has been silent, by the clock that nobody can set."""

import math
import time
from dataclasses import dataclass

import apsw

from unstuck import host
from unstuck.store.sqlite.verbs import fetch


@dataclass(frozen=True)
class Clock:
    """One instant, by all the clocks that the ledger knows."""

    at: float
    """Wall clock, for people."""
    boot_s: float
    boot_id: str
    amnesty_boot_s: float | None = None

    def silent_s(self, boot_id: str | None, beat_boot_s: float | None, beat_at: float | None) -> float:
        """Since the last beat, not counting time in which nobody could write."""
        if beat_boot_s is None or beat_at is None:
            return math.inf
        if boot_id != self.boot_id:
            # Heard before the machine was restarted: its boot clock says nothing now, and while the machine was down
            # nobody could write.
            return max(min(self.at - beat_at, self.boot_s), 0.0)
        if self.amnesty_boot_s is not None:
            beat_boot_s = max(beat_boot_s, self.amnesty_boot_s)
        return max(self.boot_s - beat_boot_s, 0.0)

    def running_s(self, boot_id: str | None, started_boot_s: float | None, started_at: float | None) -> float:
        if started_boot_s is None or started_at is None:
            return 0.0
        return max(self.boot_s - started_boot_s if boot_id == self.boot_id else self.at - started_at, 0.0)


def read_clock(cursor: apsw.Cursor | None = None) -> Clock:
    """Give now; with a cursor, the last amnesty with it."""
    boot_id = host.boot_id()
    amnesty_boot_s = None
    if cursor is not None:
        [(stored_s, stored_id)] = fetch(cursor, "amnesty")
        amnesty_boot_s = stored_s if stored_id == boot_id else None
    return Clock(time.time(), host.boottime_s(), boot_id, amnesty_boot_s)
