"""Walk the rounds of alerts: look at conditions, tell targets, outlive every outage. One sender at a time has the
round; where it dies another one has the next."""

import os
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from unstuck import host, logs
from unstuck.config import Alerts, Settings
from unstuck.domain.errors import LedgerUnavailable
from unstuck.notify.alerts.checking import usable_targets
from unstuck.notify.alerts.conditions import compare, find_conditions
from unstuck.notify.alerts.desk import TargetDesk
from unstuck.notify.failures import Failures, look_at_failures
from unstuck.store.contract import Ledger

ROUND_S = 1.0
ROUND_TICKET = "alerts"
CONDITIONS_S = 5.0
CONDITIONS_TICKET = "conditions"
FAILURES_S = 30.0
BUSY_S = 0.05
"""While a message is on its way we look after it more often."""
MAX_BACKOFF_S = 10.0
LAST_ANSWERS_S = 2.0
"""So long a sender that ends waits for answers that are on their way; the next one asks again under the same id."""

log = logs.logger("unstuck.alerts")


class AlertSender:
    """A thread beside whatever runs it: `unstuck serve`, `up`, `reaper` or `alerts run`."""

    def __init__(self, ledger: Ledger, settings: Settings) -> None:
        rules: Alerts = settings.alerts
        targets = usable_targets(rules)
        by = f"{host.hostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self._ledger = ledger
        self._rules = rules
        self._check_interval_s = settings.recovery.check_interval_s
        self._desks = [TargetDesk(target, rules, by) for target in targets]
        self._conditions_s = 0.0
        self._failing: Failures | None = None
        self._failing_s = 0.0
        self._failures = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="unstuck-alerts", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, patience_s: float = 2 * LAST_ANSWERS_S) -> None:
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(patience_s)

    def run_round(self) -> None:
        """Do what is due, if this round is ours."""
        if not self._ledger.take_ticket(ROUND_TICKET, ROUND_S * 0.9):
            return
        # Targets first: one that is met in this round is to hear of the conditions that it finds.
        self._each(lambda desk: desk.look(self._ledger))
        self._look_at_conditions()

    # ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        log.info("Alerts are sent from here", targets=[desk.target.shown for desk in self._desks])
        next_s = 0.0
        while not self._stopping.is_set():
            now_s = time.monotonic()
            try:
                self._finish_sends()
                if now_s >= next_s:
                    next_s = now_s + ROUND_S * random.uniform(0.9, 1.1)
                    self.run_round()
                if self._failures:
                    log.info("Alerts are sent again", failed_rounds=self._failures)
                    self._failures = 0
            except Exception as error:  # noqa: BLE001 - a sender that dies of a surprise tells nobody anything again
                next_s = now_s + self._trouble(error)
            busy = any(desk.busy for desk in self._desks) and not self._failures
            self._stopping.wait(BUSY_S if busy else max(0.0, next_s - time.monotonic()))
        self._last_words()

    def _look_at_conditions(self) -> None:
        now_s = host.boottime_s()
        if now_s < self._conditions_s:
            return
        self._conditions_s = now_s + CONDITIONS_S
        if not self._ledger.take_ticket(CONDITIONS_TICKET, CONDITIONS_S * 0.9):
            return
        look = self._ledger.look_for_conditions(self._rules.heartbeat_late_s)
        known = self._ledger.conditions()
        found = find_conditions(look, self._rules, self._check_interval_s, self._look_at_failures(), known)
        changes = compare(found, known, look, self._rules)
        self._ledger.change_conditions(changes, self._rules.remind_every_s)

    def _look_at_failures(self) -> Failures:
        """Return which tasks and schedules fail; counted by the minute, and looked at less often than the rest."""
        if self._failing is None or host.boottime_s() >= self._failing_s:
            self._failing = look_at_failures(self._ledger, self._rules.failure_rate)
            self._failing_s = host.boottime_s() + FAILURES_S
        return self._failing

    def _finish_sends(self) -> None:
        self._each(lambda desk: desk.finish(self._ledger))

    def _each(self, act: Callable[[TargetDesk], None]) -> None:
        """Do it for every target; what goes wrong with one must not keep the others from being told."""
        surprise: Exception | None = None
        for desk in self._desks:
            try:
                act(desk)
            except LedgerUnavailable:
                raise
            except Exception as error:  # noqa: BLE001 - raised below, when the others had their turn
                surprise = error
        if surprise is not None:
            raise surprise

    def _trouble(self, error: Exception) -> float:
        """Say it once per series, and give the wait."""
        if self._failures == 0:
            if isinstance(error, LedgerUnavailable):
                log.warning("Alerts cannot be sent: the ledger cannot be reached", error=str(error))
            else:
                log.exception("A round of alerts failed; the next one tries again")
        self._failures += 1
        return min(ROUND_S * 2.0 ** min(self._failures, 10), MAX_BACKOFF_S) * random.uniform(0.5, 1.0)

    def _last_words(self) -> None:
        deadline_s = time.monotonic() + LAST_ANSWERS_S
        try:
            for desk in self._desks:
                desk.finish(self._ledger, patience_s=max(0.0, deadline_s - time.monotonic()))
        except Exception:  # noqa: BLE001 - we leave anyway; what is not written is told again under the same id
            pass


@contextmanager
def sending(sender: AlertSender | None) -> Iterator[None]:
    """Send alerts meanwhile, where there is a sender."""
    if sender is None:
        yield
        return
    sender.start()
    try:
        yield
    finally:
        sender.stop()


def sender_of(ledger: Ledger, settings: Settings) -> AlertSender | None:
    """Give a sender where somebody is to be told; None where no target is set."""
    return AlertSender(ledger, settings) if settings.alerts.targets else None
