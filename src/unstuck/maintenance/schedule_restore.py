"""Restore the schedules of this worker's code if a worker that is gone changed them.

The last worker that starts decides how a schedule is defined, and a worker fires only what it knows exactly so. Without
this, a short-lived worker with other code would leave a schedule behind that no living worker fires.
"""

from collections.abc import Iterable

from unstuck import host, logs
from unstuck.domain.schedules import ScheduleDefinition
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.schedules import ScheduleRecord

LOOK_EVERY_S = 30.0

log = logs.logger("unstuck.schedules")


class ScheduleRestorer:
    """Compares the schedules in the ledger with those of one worker's code."""

    def __init__(self, ledger: Ledger, definitions: Iterable[ScheduleDefinition]) -> None:
        self._ledger = ledger
        self._definitions = {one.name: one for one in definitions}
        # Not at once: a worker that has just started wrote its definitions down itself, and has ticks to fire.
        self._next_s = host.boottime_s() + LOOK_EVERY_S
        self._warned: set[str] = set()
        """Fingerprints of definitions that were told of."""

    def look_now_and_then(self) -> None:
        """Look if the last look was some time ago."""
        now_s = host.boottime_s()
        if self._definitions and now_s >= self._next_s:
            self._next_s = now_s + LOOK_EVERY_S
            self.look()

    def look(self) -> None:
        """Restore what no living worker would fire, and warn of what another living worker defines differently."""
        known = {name: one.fingerprint for name, one in self._definitions.items()}
        for record, has_worker in self._ledger.schedules.differing(known):
            if has_worker:
                self._warn(record)
            else:
                self._restore(record)

    def _warn(self, record: ScheduleRecord) -> None:
        if record.fingerprint not in self._warned:
            self._warned.add(record.fingerprint)
            log.warning(
                "Another worker defines a schedule differently. Its definition is in force, and this worker does not "
                "fire the schedule",
                schedule=record.name,
                in_force=str(record.timing),
                here=str(self._definitions[record.name].timing),
            )

    def _restore(self, record: ScheduleRecord) -> None:
        own = self._definitions[record.name]
        message = (
            f"Schedule {record.name!r} was changed by a worker that is gone, and no living worker fired it. A living "
            f"worker restored its own definition ({own.timing} instead of {record.timing})"
        )
        if self._ledger.schedules.restore(own, record.fingerprint, message):
            log.warning(message, schedule=record.name)
            self._ledger.notify({"schedules"})
