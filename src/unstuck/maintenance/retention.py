"""Remove what was kept long enough: as long as there is something to remove, in short batches, for a share of the time.

One reaper does it at a time, by a ticket that ends by itself. A batch is short, so that no turn, claim or heartbeat
waits for long: its size follows the time that the last one took. After each batch the others get as much time.
"""

from collections import deque
from collections.abc import Callable

from unstuck import host
from unstuck.domain.recovery_rules import Kept
from unstuck.errors import LedgerBusy
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.maintenance import Swept
from unstuck.logs import logger
from unstuck.recovery.result import SweepResult

RETENTION_EVERY_S = 60.0
"""How often the ledger is looked at if there was nothing more to remove."""
RETENTION_TICKET = "retention"
TICKET_S = RETENTION_EVERY_S * 0.9
BATCH_S = 0.025
"""How long a batch should take at most; less if heartbeats are frequent."""
BATCHES_PER_HEARTBEAT = 10
SHARE = 0.5
"""The share of the time in which batches may run."""
LONG_S = 0.25
"""From here on a batch is slow by itself, not only because the machine is busy."""
SMALLEST_BATCH, USUAL_BATCH, LARGEST_BATCH = 100, 2_000, 10_000
"""The usual batch takes about 10 ms of CPU time and removes more jobs than a turn can end. On a machine that is busy
with other work smaller ones would not be quicker, and retention would fall behind."""
BUSY_PAUSE_S = 1.0
ONCE_S = 30.0
"""How long a single round, as cron starts it, goes on removing at most."""
KEPT_MINUTES = 24 * 60
"""How far back the counters are known minute by minute."""

log = logger("unstuck.maintenance")

Sweep = Callable[[Ledger, Kept, int], Swept]


class Chore:
    """One kind of removal, with the size of its next batch."""

    def __init__(self, sweep: Sweep) -> None:
        self.sweep = sweep
        self.limit = USUAL_BATCH

    def adapt(self, took_s: float, batch_s: float) -> None:
        """Choose the size of the next batch by the time that this one took."""
        if took_s > LONG_S:
            self.limit = max(SMALLEST_BATCH, int(self.limit * LONG_S / 2 / took_s))
        elif self.limit < USUAL_BATCH:
            self.limit = min(USUAL_BATCH, self.limit * 2)
        elif took_s > batch_s:
            self.limit = max(USUAL_BATCH, int(self.limit * batch_s / took_s))
        elif took_s < batch_s / 2:
            self.limit = min(LARGEST_BATCH, self.limit * 2)


class Housekeeping:
    """The walk of one reaper. Each call of `run` removes one batch, if one is due."""

    def __init__(self, heartbeat_interval_s: float) -> None:
        self._batch_s = min(BATCH_S, heartbeat_interval_s / BATCHES_PER_HEARTBEAT)
        self._chores = [Chore(_sweep_old), Chore(_sweep_kept), Chore(_sweep_audit), Chore(_sweep_counters)]
        self._open: deque[Chore] = deque()
        """What is left to do of this walk."""
        self._began_s = 0.0
        self._next_s = 0.0
        self._ticket_until_s = 0.0

    def run(self, ledger: Ledger, kept: Kept, done: SweepResult) -> None:
        """Remove one batch if it is time, and say in `done` when the next one is due; None: with a later round."""
        now_s = host.boottime_s()
        if now_s >= self._next_s and self._may_work(ledger, now_s):
            self._work(ledger, kept, done)
        if self._open:
            done.next_batch_in_s = max(0.0, self._next_s - host.boottime_s())

    def _may_work(self, ledger: Ledger, now_s: float) -> bool:
        if now_s < self._ticket_until_s:
            return True
        if not ledger.maintenance.take_ticket(RETENTION_TICKET, TICKET_S):
            self._open.clear()
            self._next_s = now_s + RETENTION_EVERY_S
            return False
        self._ticket_until_s = now_s + TICKET_S
        return True

    def _work(self, ledger: Ledger, kept: Kept, done: SweepResult) -> None:
        if not self._open:
            self._began_s = host.boottime_s()
            self._open.extend(self._chores)
        chore = self._open.popleft()
        try:
            swept = chore.sweep(ledger, kept, chore.limit)
        except LedgerBusy as error:
            log.debug("Retention makes way and tries again", error=str(error), batch=chore.limit)
            chore.limit = SMALLEST_BATCH
            self._open.append(chore)
            self._next_s = host.boottime_s() + BUSY_PAUSE_S
            return
        done.pruned += swept.total
        if swept.more:
            chore.adapt(swept.took_s, self._batch_s)
            self._open.append(chore)
        self._next_s = host.boottime_s() + swept.took_s * (1 - SHARE) / SHARE
        if not self._open:
            self._next_s = max(self._next_s, self._began_s + RETENTION_EVERY_S)


def _sweep_old(ledger: Ledger, kept: Kept, limit: int) -> Swept:
    return ledger.maintenance.sweep_old(kept.jobs_s, kept.events_s, kept.workers_s, limit)


def _sweep_kept(ledger: Ledger, _kept: Kept, limit: int) -> Swept:
    return ledger.maintenance.sweep_kept(limit)


def _sweep_audit(ledger: Ledger, kept: Kept, limit: int) -> Swept:
    return _timed(lambda: ledger.maintenance.sweep_audit(kept.audit_s, limit), limit)


def _sweep_counters(ledger: Ledger, _kept: Kept, limit: int) -> Swept:
    return _timed(lambda: ledger.maintenance.sweep_counters(KEPT_MINUTES, limit), limit)


def _timed(sweep: Callable[[], int], limit: int) -> Swept:
    began_s = host.boottime_s()
    removed = sweep()
    return Swept(events=removed, more=removed >= limit, took_s=host.boottime_s() - began_s)
