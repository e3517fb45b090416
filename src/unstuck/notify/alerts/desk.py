"""Serve one target: read its book, decide, send, and write down what became of it.

Before a message is sent its events and its delivery id are written down. Whoever comes after a sender that died in
between finds them, and repeats the message under the same id.
"""

import secrets

import msgspec

from unstuck import failpoints, host, logs
from unstuck.config import Alerts
from unstuck.domain.cursor import Cursor, read_cursor
from unstuck.domain.durations import brief
from unstuck.notify.alerts import bookkeeping
from unstuck.notify.alerts.batching import Tell, TellAgain, Wait, decide, retry_s
from unstuck.notify.alerts.bookkeeping import MAX_BATCH, Book, Sending, read_book, write_book
from unstuck.notify.alerts.kinds import events_of
from unstuck.notify.alerts.message import compose
from unstuck.notify.alerts.outcomes import Arrived, Lost, Outcome
from unstuck.notify.alerts.sending import Send
from unstuck.notify.alerts.targets import Target
from unstuck.store.contract import Ledger
from unstuck.store.records import AlertEvent, AlertTarget

LEASE_TIMEOUTS = 2.0
LEASE_MARGIN_S = 1.0
SETTLE_TRIES = 5

log = logs.logger("unstuck.alerts")


class TargetDesk:
    """Everything about one target in this process. Used by one thread."""

    def __init__(self, target: Target, rules: Alerts, by: str) -> None:
        self.target = target
        self._rules = rules
        self._by = by
        self._kinds = events_of(rules.told_kinds)
        self._send: Send | None = None
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
        found = ledger.alert_target(self.target.fingerprint)
        if found is None:
            ledger.add_alert_target(self.target.fingerprint)
            return
        book = read_book(found.state)
        position = read_cursor(found.position)
        page = ledger.events_to_tell(self._kinds, position, book.told_ids, MAX_BATCH)
        if not page.is_known and position.is_ahead_of(found.newest) and found.newest.id:
            self._begin_again(ledger, found, book)
            return
        self._mind_the_gap(page.is_known)
        untold = page.events
        match decide(book, untold, found.now_at, self._rules, self._by):
            case Wait():
                self._advance(ledger, found, book, position, untold)
            case Tell(events):
                self._begin(ledger, found, book, events)
            case TellAgain(events):
                self._again(ledger, found, book, events)

    def finish(self, ledger: Ledger, patience_s: float = 0.0) -> None:
        """Write down what became of the message that is on its way, if that is known by now."""
        send = self._send
        if send is None:
            return
        if self._outcome is None:
            self._outcome = send.wait(patience_s)
        if self._outcome is None and host.boottime_s() >= self._give_up_s:
            self._outcome = Lost(f"no answer within {brief(self._rules.send_timeout_s)}", maybe_arrived=True)
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

    def _begin(self, ledger: Ledger, found: AlertTarget, book: Book, events: tuple[AlertEvent, ...]) -> None:
        self._dispatch(ledger, found, book, events, secrets.token_hex(16), 1)

    def _again(self, ledger: Ledger, found: AlertTarget, book: Book, events: tuple[AlertEvent, ...]) -> None:
        assert book.sending is not None
        if not events:
            # Nothing of it is left to be told.
            settled = bookkeeping.arrived(book, found.now_at)
            ledger.save_alert_target(self.target.fingerprint, found.version, found.position, write_book(settled))
            return
        self._dispatch(ledger, found, book, events, book.sending.delivery, book.sending.tries + 1)

    def _dispatch(
        self,
        ledger: Ledger,
        found: AlertTarget,
        book: Book,
        events: tuple[AlertEvent, ...],
        delivery: str,
        tries: int,
    ) -> None:
        lease_s = LEASE_TIMEOUTS * self._rules.send_timeout_s + LEASE_MARGIN_S
        keys = tuple(event.key for event in events)
        sending = Sending(delivery, keys, found.now_at, self._by, found.now_at + lease_s, tries)
        text = write_book(bookkeeping.begin(book, sending))
        if not ledger.save_alert_target(self.target.fingerprint, found.version, found.position, text):
            # Somebody else was faster.
            return
        if failpoints.active:
            failpoints.reached("alerts.before_send")
        message = compose(events, repeated=tries > 1)
        self._give_up_s = host.boottime_s() + self._rules.send_timeout_s + LEASE_MARGIN_S
        self._send, self._outcome, self._written = Send(self.target, message, delivery, self._rules), None, False

    def _settle(self, ledger: Ledger, delivery: str, outcome: Outcome) -> None:
        if failpoints.active:
            failpoints.reached("alerts.after_send")
        for _ in range(SETTLE_TRIES):
            found = ledger.alert_target(self.target.fingerprint)
            book = None if found is None else read_book(found.state)
            if found is None or book is None or book.sending is None or book.sending.delivery != delivery:
                # Somebody took us for dead and finished it.
                return
            settled = self._settled(book, found.now_at, outcome)
            if ledger.save_alert_target(self.target.fingerprint, found.version, found.position, write_book(settled)):
                self._report(book, settled, outcome)
                return

    def _settled(self, book: Book, now_at: float, outcome: Outcome) -> Book:
        match outcome:
            case Arrived():
                return bookkeeping.arrived(book, now_at)
            case Lost(reason, maybe_arrived):
                wait_s = retry_s(book.failures + 1)
                return bookkeeping.failed(book, now_at, reason, wait_s, maybe_arrived=maybe_arrived)

    def _report(self, before: Book, after: Book, outcome: Outcome) -> None:
        name = self.target.shown
        match outcome:
            case Arrived():
                told = 0 if before.sending is None else len(before.sending.events)
                log.info("Alert sent", target=name, alerts=told)
            case Lost(reason) if after.failures == 1:
                # Once per series: a line per try would bury what matters.
                log.warning("An alert target cannot be told; trying again, ever more slowly", target=name, why=reason)
            case Lost(reason):
                log.debug("An alert target still cannot be told", target=name, why=reason, failures=after.failures)

    def _advance(
        self, ledger: Ledger, found: AlertTarget, book: Book, position: Cursor, untold: list[AlertEvent]
    ) -> None:
        keys = [event.key for event in untold]
        reached, trimmed = bookkeeping.advance(book, position, keys, found.newest, found.now_at)
        if (reached, trimmed) != (position, book):
            ledger.save_alert_target(self.target.fingerprint, found.version, str(reached), write_book(trimmed))

    def _begin_again(self, ledger: Ledger, found: AlertTarget, book: Book) -> None:
        """Go on with what is new: the position is of a history that the ledger does not have, as after a restore."""
        log.warning(_GAP, target=self.target.shown)
        fresh = msgspec.structs.replace(book, told=(), sending=None)
        ledger.save_alert_target(self.target.fingerprint, found.version, str(found.newest), write_book(fresh))

    def _mind_the_gap(self, is_known: bool) -> None:
        """Report that retention removed events, or a failover replaced them, before this target was told."""
        if not is_known and not self._is_gap_reported:
            log.warning(_GAP, target=self.target.shown)
        self._is_gap_reported = not is_known


_GAP = "Alerts may have been missed: the ledger does not have the last event that this target was told of"
