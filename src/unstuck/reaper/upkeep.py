"""Keep the ledger in order between deaths: make due jobs ready, remove what was kept long enough."""

from unstuck import host
from unstuck.config import Retention
from unstuck.logs import logger
from unstuck.reaper.rounds import Round
from unstuck.store.contract import Ledger

PROMOTE_BATCH = 1_000
REPAIR_BATCH = 100
RETENTION_BATCH = 1_000
MAX_BATCHES = 10
KEPT_MINUTES = 24 * 60
"""How far back the counters are known minute by minute."""
RETENTION_EVERY_S = 60.0
RETENTION_TICKET = "retention"

log = logger("unstuck.reaper")


def promote(ledger: Ledger, done: Round) -> None:
    """Make ready what is due, in bounded batches; the rest waits for the next round."""
    for _ in range(MAX_BATCHES):
        promoted = ledger.promote_due(PROMOTE_BATCH)
        done.promoted += promoted.count
        done.queues |= promoted.queues
        if promoted.count < PROMOTE_BATCH:
            done.due_in(promoted.next_due_in_s)
            return
    done.due_in(0.0)


def mend_workflows(ledger: Ledger, done: Round) -> None:
    """Repair workflows that cannot go on by themselves: rows edited by hand, or restored from a backup."""
    for repaired in ledger.repair_workflows(REPAIR_BATCH):
        log.warning("A workflow was repaired", workflow_id=repaired.workflow_id, what=repaired.what)
        done.repaired += 1


class Housekeeping:
    """Retention, once a minute for the whole ledger."""

    def __init__(self) -> None:
        self._next_s = 0.0

    def run(self, ledger: Ledger, kept: Retention, done: Round) -> None:
        now_s = host.boottime_s()
        if now_s < self._next_s:
            return
        self._next_s = now_s + RETENTION_EVERY_S
        if not ledger.take_ticket(RETENTION_TICKET, RETENTION_EVERY_S * 0.9):
            return
        done.pruned += ledger.sweep_audit(kept.audit_s, RETENTION_BATCH)
        for _ in range(MAX_BATCHES):
            swept = ledger.sweep_old(kept.jobs_s, kept.events_s, kept.workers_s, RETENTION_BATCH)
            done.pruned += swept.jobs + swept.events + swept.workers
            if max(swept.jobs, swept.events, swept.workers) < RETENTION_BATCH:
                break
        for _ in range(MAX_BATCHES):
            if ledger.sweep_counters(KEPT_MINUTES, RETENTION_BATCH) < RETENTION_BATCH:
                break
