"""Send alerts: one loop, and one sender per target. A delivery is stored before it is sent.

Before a message is sent its events and its delivery id are written down. Whoever comes after a sender that died in
between finds them, and repeats the message under the same id.
"""

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from unstuck import failpoints, host, logs
from unstuck.config import Alerts, Settings
from unstuck.domain.event_cursor import Cursor, read_cursor
from unstuck.domain.jitter import jitter
from unstuck.domain.units import brief
from unstuck.errors import LedgerUnavailable
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.events import AlertEvent, AlertTarget
from unstuck.notify.alerts import delivery as alerts_delivery
from unstuck.notify.alerts.conditions import compare, events_of, find_conditions
from unstuck.notify.alerts.delivery import (
    MAX_BATCH,
    Delivery,
    DeliveryState,
    Resend,
    SendNow,
    Wait,
    plan,
    read_state,
    retry_s,
    write_state,
)
from unstuck.notify.alerts.message import compose
from unstuck.notify.alerts.targets import Delivered, DeliveryThread, NotDelivered, Outcome, Target, usable_targets
from unstuck.notify.failures import Failures, look_at_failures

LEASE_TIMEOUTS = 2.0
LEASE_MARGIN_S = 1.0
SETTLE_TRIES = 5

log = logs.logger("unstuck.alerts")


class TargetSender:
    """Everything about one target in this process. Used by one thread."""

    def __init__(self, target: Target, rules: Alerts, by: str) -> None:
        self.target = target
        self._rules = rules
        self._by = by
        self._kinds = events_of(rules.told_kinds)
        self._send: DeliveryThread | None = None
        self._give_up_s = 0.0
        self._outcome: Outcome | None = None
        self._written = False
        self._is_gap_reported = False

    @property
    def busy(self) -> bool:
        return self._send is not None

    def look(self, ledger: Ledger) -> None:
        """Tell what is due, if anything is and nobody else is at it."""
        if self._send is not None:
            return
        found = ledger.events.alert_target(self.target.fingerprint)
        if found is None:
            ledger.events.add_alert_target(self.target.fingerprint)
            return
        book = read_state(found.state)
        position = read_cursor(found.position)
        page = ledger.events.for_alerts(self._kinds, position, book.told_ids, MAX_BATCH)
        if not page.is_known and position.is_ahead_of(found.newest) and found.newest.id:
            self._begin_again(ledger, found, book)
            return
        self._mind_the_gap(page.is_known)
        untold = page.events
        match plan(book, untold, found.now_at, self._rules, self._by):
            case Wait():
                self._advance(ledger, found, book, position, untold)
            case SendNow(events):
                self._begin(ledger, found, book, events)
            case Resend(events):
                self._again(ledger, found, book, events)

    def finish(self, ledger: Ledger, patience_s: float = 0.0) -> None:
        """Write down what became of the message that is on its way, if that is known by now."""
        send = self._send
        if send is None:
            return
        if self._outcome is None:
            self._outcome = send.wait(patience_s)
        if self._outcome is None and host.boottime_s() >= self._give_up_s:
            self._outcome = NotDelivered(f"no answer within {brief(self._rules.send_timeout_s)}", maybe_arrived=True)
        if self._outcome is None:
            return
        if not self._written:
            # Kept until it is written: an outage of the ledger must not make us forget that it arrived.
            self._settle(ledger, send.delivery, self._outcome)
            self._written = True
        if send.over:
            # While it hangs no other may be begun: never more than one thread for each target.
            self._send = self._outcome = None

    # ------------------------------------------------------------------------------------------

    def _begin(self, ledger: Ledger, found: AlertTarget, book: DeliveryState, events: tuple[AlertEvent, ...]) -> None:
        self._dispatch(ledger, found, book, events, secrets.token_hex(16), 1)

    def _again(self, ledger: Ledger, found: AlertTarget, book: DeliveryState, events: tuple[AlertEvent, ...]) -> None:
        assert book.sending is not None
        if not events:
            # Nothing of it is left to be told.
            settled = alerts_delivery.delivered(book, found.now_at)
            ledger.events.save_alert_target(
                self.target.fingerprint, found.version, found.position, write_state(settled)
            )
            return
        self._dispatch(ledger, found, book, events, book.sending.delivery, book.sending.tries + 1)

    def _dispatch(
        self,
        ledger: Ledger,
        found: AlertTarget,
        book: DeliveryState,
        events: tuple[AlertEvent, ...],
        delivery: str,
        tries: int,
    ) -> None:
        lease_s = LEASE_TIMEOUTS * self._rules.send_timeout_s + LEASE_MARGIN_S
        keys = tuple(event.key for event in events)
        sending = Delivery(delivery, keys, found.now_at, self._by, found.now_at + lease_s, tries)
        text = write_state(alerts_delivery.begin(book, sending))
        if not ledger.events.save_alert_target(self.target.fingerprint, found.version, found.position, text):
            # Somebody else was faster.
            return
        if failpoints.active:
            failpoints.reached("alerts.before_send")
        message = compose(events, repeated=tries > 1)
        self._give_up_s = host.boottime_s() + self._rules.send_timeout_s + LEASE_MARGIN_S
        self._send, self._outcome, self._written = (
            DeliveryThread(self.target, message, delivery, self._rules),
            None,
            False,
        )

    def _settle(self, ledger: Ledger, delivery: str, outcome: Outcome) -> None:
        if failpoints.active:
            failpoints.reached("alerts.after_send")
        for _ in range(SETTLE_TRIES):
            found = ledger.events.alert_target(self.target.fingerprint)
            book = None if found is None else read_state(found.state)
            if found is None or book is None or book.sending is None or book.sending.delivery != delivery:
                # Somebody took us for dead and finished it.
                return
            settled = self._settled(book, found.now_at, outcome)
            if ledger.events.save_alert_target(
                self.target.fingerprint, found.version, found.position, write_state(settled)
            ):
                self._report(book, settled, outcome)
                return

    def _settled(self, book: DeliveryState, now_at: float, outcome: Outcome) -> DeliveryState:
        match outcome:
            case Delivered():
                return alerts_delivery.delivered(book, now_at)
            case NotDelivered(reason, maybe_arrived):
                wait_s = retry_s(book.failures + 1)
                return alerts_delivery.failed(book, now_at, reason, wait_s, maybe_arrived=maybe_arrived)

    def _report(self, before: DeliveryState, after: DeliveryState, outcome: Outcome) -> None:
        name = self.target.shown
        match outcome:
            case Delivered():
                told = 0 if before.sending is None else len(before.sending.events)
                log.info("Alert sent", target=name, alerts=told)
            case NotDelivered(reason) if after.failures == 1:
                # Once per series: a line per try would bury what matters.
                log.warning("An alert target cannot be told; trying again, ever more slowly", target=name, why=reason)
            case NotDelivered(reason):
                log.debug("An alert target still cannot be told", target=name, why=reason, failures=after.failures)

    def _advance(
        self, ledger: Ledger, found: AlertTarget, book: DeliveryState, position: Cursor, untold: list[AlertEvent]
    ) -> None:
        keys = [event.key for event in untold]
        reached, trimmed = alerts_delivery.advance(book, position, keys, found.newest, found.now_at)
        if (reached, trimmed) != (position, book):
            ledger.events.save_alert_target(self.target.fingerprint, found.version, str(reached), write_state(trimmed))

    def _begin_again(self, ledger: Ledger, found: AlertTarget, book: DeliveryState) -> None:
        """Go on with what is new: the position is of a history that the ledger does not have, as after a restore."""
        log.warning(_GAP, target=self.target.shown)
        fresh = msgspec.structs.replace(book, told=(), sending=None)
        ledger.events.save_alert_target(self.target.fingerprint, found.version, str(found.newest), write_state(fresh))

    def _mind_the_gap(self, is_known: bool) -> None:
        """Report that retention removed events, or a failover replaced them, before this target was told."""
        if not is_known and not self._is_gap_reported:
            log.warning(_GAP, target=self.target.shown)
        self._is_gap_reported = not is_known


_GAP = "Alerts may have been missed: the ledger does not have the last event that this target was told of"


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


class AlertSender:
    """A thread beside whatever runs it: `unstuck serve`, `up`, `reaper` or `alerts run`."""

    def __init__(self, ledger: Ledger, settings: Settings) -> None:
        rules: Alerts = settings.alerts
        targets = usable_targets(rules)
        by = f"{host.hostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self._ledger = ledger
        self._rules = rules
        self._check_interval_s = settings.recovery.check_interval_s
        self._desks = [TargetSender(target, rules, by) for target in targets]
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
        if not self._ledger.maintenance.take_ticket(ROUND_TICKET, ROUND_S * 0.9):
            return
        # Targets first: one that is met in this round is to hear of the conditions that it finds.
        self._each(lambda sender: sender.look(self._ledger))
        self._look_at_conditions()

    # ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        log.info("Alerts are sent from here", targets=[sender.target.shown for sender in self._desks])
        next_s = 0.0
        while not self._stopping.is_set():
            now_s = time.monotonic()
            try:
                self._finish_sends()
                if now_s >= next_s:
                    next_s = now_s + ROUND_S * jitter.uniform(0.9, 1.1)
                    self.run_round()
                if self._failures:
                    log.info("Alerts are sent again", failed_rounds=self._failures)
                    self._failures = 0
            except Exception as error:  # noqa: BLE001 - a sender that dies of a surprise tells nobody anything again
                next_s = now_s + self._trouble(error)
            busy = any(sender.busy for sender in self._desks) and not self._failures
            self._stopping.wait(BUSY_S if busy else max(0.0, next_s - time.monotonic()))
        self._last_words()

    def _look_at_conditions(self) -> None:
        now_s = host.boottime_s()
        if now_s < self._conditions_s:
            return
        self._conditions_s = now_s + CONDITIONS_S
        if not self._ledger.maintenance.take_ticket(CONDITIONS_TICKET, CONDITIONS_S * 0.9):
            return
        look = self._ledger.events.look_for_conditions(self._rules.heartbeat_late_s)
        known = self._ledger.events.conditions()
        found = find_conditions(look, self._rules, self._check_interval_s, self._look_at_failures(), known)
        changes = compare(found, known, look, self._rules)
        self._ledger.events.change_conditions(changes, self._rules.remind_every_s)

    def _look_at_failures(self) -> Failures:
        """Return which tasks and schedules fail; counted by the minute, and looked at less often than the rest."""
        if self._failing is None or host.boottime_s() >= self._failing_s:
            self._failing = look_at_failures(self._ledger, self._rules.failure_rate)
            self._failing_s = host.boottime_s() + FAILURES_S
        return self._failing

    def _finish_sends(self) -> None:
        self._each(lambda sender: sender.finish(self._ledger))

    def _each(self, act: Callable[[TargetSender], None]) -> None:
        """Do it for every target; what goes wrong with one must not keep the others from being told."""
        surprise: Exception | None = None
        for sender in self._desks:
            try:
                act(sender)
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
        return min(ROUND_S * 2.0 ** min(self._failures, 10), MAX_BACKOFF_S) * jitter.uniform(0.5, 1.0)

    def _last_words(self) -> None:
        deadline_s = time.monotonic() + LAST_ANSWERS_S
        try:
            for sender in self._desks:
                sender.finish(self._ledger, patience_s=max(0.0, deadline_s - time.monotonic()))
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
