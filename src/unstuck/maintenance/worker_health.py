"""Disable workers that keep crashing, but never the last of a queue; enable them again if no other is left."""

from collections.abc import Sequence

from unstuck import host, logs
from unstuck.domain.worker_health import Standing, should_disable, should_enable
from unstuck.ledger.contract import Ledger
from unstuck.recovery.result import SweepResult

HEALTH_EVERY_S = 2.0
HEALTH_TICKET = "health"

log = logs.logger("unstuck.maintenance")


class HealthWatch:
    """One look at everybody's health every few seconds, for the whole ledger."""

    def __init__(self, by: str) -> None:
        self._by = by
        self._next_s = 0.0

    def run(self, ledger: Ledger, done: SweepResult) -> None:
        now_s = host.boottime_s()
        if now_s < self._next_s:
            return
        self._next_s = now_s + HEALTH_EVERY_S
        if ledger.maintenance.take_ticket(HEALTH_TICKET, HEALTH_EVERY_S * 0.9):
            self.judge(ledger, done)

    def judge(self, ledger: Ledger, done: SweepResult) -> None:
        """Do at most one thing: what it changes must be seen before the next one is judged."""
        fleet = ledger.workers.standings()
        if not self._bring_back(ledger, fleet) and self._disable_worker(ledger, fleet):
            done.disabled += 1

    def _disable_worker(self, ledger: Ledger, fleet: Sequence[Standing]) -> bool:
        # The sickest first: without it, its neighbours may do well.
        for worker in sorted(fleet, key=lambda one: -one.health.weight):
            reason = should_disable(worker, fleet)
            if reason is not None and ledger.workers.disable(worker.id, reason, self._by, auto=True):
                ledger.notify({f"worker:{worker.id}"})
                log.error(
                    f"Worker disabled: {reason}. Look at its host, then `unstuck workers enable {worker.id}`.",
                    worker=worker.id,
                    worker_name=worker.name,
                    host=worker.host,
                    score=worker.health.score,
                )
                return True
        return False

    def _bring_back(self, ledger: Ledger, fleet: Sequence[Standing]) -> bool:
        for worker in sorted(fleet, key=lambda one: one.health.weight):
            reason = should_enable(worker, fleet)
            if reason is not None and ledger.workers.enable(worker.id, self._by, reason):
                ledger.notify({f"worker:{worker.id}"})
                log.warning(f"Enabled again: {reason}", worker=worker.id, worker_name=worker.name, host=worker.host)
                return True
        return False
