"""Keep the ledger in order between deaths: make due jobs ready, look after concurrency keys and workflows."""

from unstuck import host
from unstuck.domain.units import brief
from unstuck.ledger.contract import Ledger
from unstuck.logs import logger
from unstuck.recovery.result import SweepResult

PROMOTE_BATCH = 1_000
REPAIR_BATCH = 100
MAX_BATCHES = 10
ORDER_EVERY_S = 5.0
ORDER_TICKET = "order"
CHECKED_KEYS = 500
SET_BACK_AT_ONCE = 10_000

log = logger("unstuck.maintenance")


def promote(ledger: Ledger, done: SweepResult) -> None:
    """Make ready what is due, in bounded batches; the rest waits for the next round."""
    for _ in range(MAX_BATCHES):
        promoted = ledger.maintenance.promote_due(PROMOTE_BATCH)
        done.promoted += promoted.count
        done.queues |= promoted.queues
        if promoted.count < PROMOTE_BATCH:
            done.due_in(promoted.next_due_in_s)
            return
    done.due_in(0.0)


def expire(ledger: Ledger, done: SweepResult) -> None:
    """Cancel what was not begun in time, in bounded batches."""
    for _ in range(MAX_BATCHES):
        expired = ledger.maintenance.expire_due(PROMOTE_BATCH)
        done.expired += expired.count
        if expired.count < PROMOTE_BATCH:
            done.due_in(expired.next_in_s)
            return
    done.due_in(0.0)


class ConcurrencyUpkeep:
    """Order in queues, every few seconds for the whole ledger: the clock and concurrency keys."""

    def __init__(self) -> None:
        self._next_s = 0.0
        self._after = ""

    def run(self, ledger: Ledger, done: SweepResult) -> None:
        now_s = host.boottime_s()
        if now_s < self._next_s:
            return
        self._next_s = now_s + ORDER_EVERY_S
        if not ledger.maintenance.take_ticket(ORDER_TICKET, ORDER_EVERY_S * 0.9):
            return
        if set_back_s := ledger.maintenance.follow_clock(SET_BACK_AT_ONCE):
            log.warning(f"The ledger's clock was set back by {brief(set_back_s)}. Retries wait no longer for that.")
        tended = ledger.maintenance.check_keys(self._after, CHECKED_KEYS)
        self._after = tended.next_after or ""
        done.repaired += tended.repaired


def repair_workflows(ledger: Ledger, done: SweepResult) -> None:
    """Repair workflows that cannot go on by themselves: rows edited by hand, or restored from a backup."""
    for repaired in ledger.maintenance.repair_workflows(REPAIR_BATCH):
        log.warning("A workflow was repaired", workflow_id=repaired.workflow_id, what=repaired.what)
        done.repaired += 1
