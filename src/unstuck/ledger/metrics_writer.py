"""Bring what a process tallied to its ledger, a few times a minute.

Whatever calls it is never kept: a ledger that is away costs nothing, and what could not be written waits for the next
time, as the difference between what was tallied and what was written. So it needs no room of its own.
"""

import threading
from collections.abc import Iterator

from unstuck import host, logs
from unstuck.domain.jitter import jitter
from unstuck.errors import LedgerError, RefusedValue, UncertainCommit
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.admin import Count
from unstuck.metrics.catalogue import BEAT_DELAY, SWEEP
from unstuck.metrics.counters import Counted, Counters, Snapshot

FLUSH_S = 15.0
FLUSH_BEATS = 3
"""With every third heartbeat of a worker, where that is sooner."""
ROUTINE_S = 60.0
"""How often at most an idle process writes: its beats and rounds are no news."""
MAX_ROWS = 1_000
"""Of one write."""
_ROUTINE = frozenset({BEAT_DELAY.name, BEAT_DELAY.sum_name, SWEEP.name, SWEEP.sum_name})

log = logs.logger("unstuck.metrics")


class MetricsWriter:
    """Any thread may come by; one at a time writes, and nobody waits for it."""

    def __init__(self, ledger: Ledger, counters: Counters, beat_interval_s: float = FLUSH_S) -> None:
        self.counters = counters
        self._ledger = ledger
        self._interval_s = min(FLUSH_BEATS * beat_interval_s, FLUSH_S)
        self._written = Snapshot()
        # Not all at once, where many were started together.
        self._next_s = host.boottime_s() + jitter.uniform(0.5, 1.0) * self._interval_s
        self._routine_s = 0.0
        self._failed = False
        self._writing = threading.Lock()

    def tend(self) -> None:
        """Write what changed, if it is time to; never raises for a ledger that is away."""
        now_s = host.boottime_s()
        if now_s < self._next_s or not self._writing.acquire(blocking=False):
            return
        try:
            self._next_s = now_s + self._interval_s
            self._flush(self.counters.snapshot(), idle=now_s < self._routine_s)
        finally:
            self._writing.release()

    def flush(self) -> None:
        """Write what changed: the last words of a process."""
        with self._writing:
            self._flush(self.counters.snapshot(), idle=False)

    def _flush(self, now: Snapshot, *, idle: bool) -> None:
        news = now.since(self._written)
        if not news.totals or (idle and all(name in _ROUTINE for name, _ in news.totals)):
            return
        try:
            for part in _parts(news):
                self._write(part)
        except LedgerError as error:
            if not self._failed:
                log.warning("What was counted could not be written; it waits for the next time", error=str(error))
            self._failed = True
            return
        self._failed = False
        self._routine_s = host.boottime_s() + ROUTINE_S

    def _write(self, part: Snapshot) -> None:
        try:
            self._ledger.admin.count(_counts(part.totals), _counts(part.per_minute_labels))
        except UncertainCommit:
            # It may have been written: to count too little once is better than to count it twice.
            pass
        except RefusedValue as error:
            log.error("A counter's labels cannot be stored; it is left out", error=str(error))
        self._written = self._written.plus(part)


def _counts(counted: Counted) -> list[Count]:
    return [Count(name, labels, value) for (name, labels), value in counted.items()]


def _parts(news: Snapshot) -> Iterator[Snapshot]:
    totals, lately = list(news.totals.items()), list(news.per_minute_labels.items())
    if len(totals) + len(lately) <= MAX_ROWS:
        yield news
        return
    for start in range(0, len(totals), MAX_ROWS):
        yield Snapshot(totals=dict(totals[start : start + MAX_ROWS]))
    for start in range(0, len(lately), MAX_ROWS):
        yield Snapshot(per_minute_labels=dict(lately[start : start + MAX_ROWS]))
