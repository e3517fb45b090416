"""Switch off workers and hosts that keep crashing, loudly and never the last; take it back where nobody is left."""

from collections.abc import Sequence

from unstuck import host, logs
from unstuck.domain.worker_health import RECENT_S, Standing, should_disable, should_disable_host, should_enable
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
        if ledger.take_ticket(HEALTH_TICKET, HEALTH_EVERY_S * 0.9):
            self.judge(ledger, done)

    def judge(self, ledger: Ledger, done: SweepResult) -> None:
        """Do at most one thing: what it changes must be seen before the next one is judged."""
        fleet = ledger.standings(RECENT_S)
        if not self._bring_back(ledger, fleet) and (
            self._disable_host(ledger, fleet) or self._disable_worker(ledger, fleet)
        ):
            done.disabled += 1

    def _disable_worker(self, ledger: Ledger, fleet: Sequence[Standing]) -> bool:
        # The sickest first: without it, its neighbours may do well.
        for worker in sorted(fleet, key=lambda one: -one.health.weight):
            reason = should_disable(worker, fleet)
            if reason is not None and ledger.disable(worker.id, reason, self._by, auto=True):
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

    def _disable_host(self, ledger: Ledger, fleet: Sequence[Standing]) -> bool:
        off = {record.name for record in ledger.hosts() if record.disabled is not None}
        for name in sorted({worker.host for worker in fleet} - off):
            reason = should_disable_host(name, fleet)
            if reason is not None and ledger.disable_host(name, reason, self._by, auto=True):
                ledger.notify(_living_of(fleet, name))
                log.error(f"Host disabled: {reason}. Mend it, then `unstuck workers enable --host {name}`.", host=name)
                return True
        return False

    def _bring_back(self, ledger: Ledger, fleet: Sequence[Standing]) -> bool:
        for worker in sorted(fleet, key=lambda one: one.health.weight):
            reason = should_enable(worker, fleet)
            if reason is None or worker.disabled is None:
                continue
            if worker.disabled.of_host:
                back = ledger.enable_host(worker.host, self._by, reason)
                words = _living_of(fleet, worker.host)
            else:
                back = ledger.enable(worker.id, self._by, reason)
                words = {f"worker:{worker.id}"}
            if back:
                ledger.notify(words)
                log.warning(f"Enabled again: {reason}", worker=worker.id, worker_name=worker.name, host=worker.host)
                return True
        return False


def _living_of(fleet: Sequence[Standing], name: str) -> set[str]:
    return {f"worker:{worker.id}" for worker in fleet if worker.host == name and worker.gone_s is None}
