"""Keep the clock of schedules: enqueue what is due, in every worker, each tick once however many there are.

Nobody is the leader. Whoever is there when a tick is due reads the schedule and fires it at the version that it read;
of several the ledger lets one through. Who dies on the way has either enqueued the tick or left it to the next one.
"""

import threading
from collections.abc import Iterable

import msgspec

from unstuck import host, logs
from unstuck.domain.jitter import jitter
from unstuck.domain.payload import JSON, with_fire_time
from unstuck.domain.schedules import DueRuns, ScheduleDefinition, due_runs, enqueued_by, fire_time_text
from unstuck.domain.states import LIVE_STATES
from unstuck.errors import LedgerBusy, LedgerError, LedgerUnavailable
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.jobs import NewJob
from unstuck.ledger.contract.schedules import FIRE_WAIT_S, Firing, ScheduleRecord, unpack_job
from unstuck.maintenance.schedule_restore import ScheduleRestorer
from unstuck.metrics.catalogue import SCHEDULE_DELAY
from unstuck.metrics.counters import Counters

LOOK_EVERY_S = 30.0
"""So often it looks where nothing is due: for schedules that were added while the bell was not heard."""
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
LONGEST_BLOCKED_S = 1.0
"""Longest pause between two tries of a schedule whose lock another session holds."""
LOCKS_S = 0.5
"""How long one lap may wait for locks. After that, blocked schedules are left to the next lap, and each other one waits
for a short moment only: a schedule that nothing blocks must not be late because others are blocked."""
SHORT_WAIT_S = 0.01
MAX_NAMED = 5
"""How many newly blocked schedules one lap names in the log."""
SCHEDULERS = 8
"""So many, by lot, come for each tick; in a larger fleet the others come a little later, in turn."""
SECOND_LINE_S = 0.25
ASKING_PER_S = 40.0
COUNT_EVERY_S = 60.0

log = logs.logger("unstuck.scheduler")


class Scheduler:
    """A thread that sleeps until the next tick. It fires what operators made, and what is defined exactly so."""

    def __init__(
        self, ledger: Ledger, definitions: Iterable[ScheduleDefinition] = (), counters: Counters | None = None
    ) -> None:
        self._ledger = ledger
        known = tuple(definitions)
        self._fingerprints = frozenset(one.fingerprint for one in known)
        self._restorer = ScheduleRestorer(ledger, known)
        self._counters = counters or Counters()
        self._workers = 1
        self._count_s = 0.0
        self._failures = 0
        self._complained: dict[str, int] = {}
        self._blocked: dict[str, tuple[float, float]] = {}
        """By name of a schedule whose lock another session holds: when it is tried again, and the pause after that."""
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="unstuck-scheduler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ask it to end after what it does just now."""
        self._stopping = True
        self._wake.set()

    def join(self, timeout_s: float | None = None) -> None:
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def kick(self) -> None:
        """Look now: somebody changed a schedule."""
        self._wake.set()

    def step(self) -> float:
        """Fire what is due and give the time until somebody should look again: one lap of the thread."""
        # The blocked ones last, whoever waits longest first: they may be more than are read in one go.
        self._restorer.look_now_and_then()
        after = sorted(self._blocked, key=lambda name: self._blocked[name][0])
        found = self._ledger.schedules.due(self._fingerprints, after)
        woken: set[str] = set()
        stumbled = fired = False
        if found.complete:
            due = {record.name for record in found.due}
            self._blocked = {name: when for name, when in self._blocked.items() if name in due}
        waited_s, newly_blocked = 0.0, 0
        for record in found.due:
            begun_s = host.boottime_s()
            is_late = waited_s >= LOCKS_S
            again_s = self._blocked.get(record.name, (0.0, 0.0))[0]
            if again_s and (is_late or begun_s < again_s):
                continue
            try:
                woken |= self._fire(record, found.now, SHORT_WAIT_S if is_late else FIRE_WAIT_S)
                fired = True
                self._blocked.pop(record.name, None)
            except LedgerBusy as error:
                # Nothing was written: its tick is fired when the lock is free, and the others do not wait for it.
                waited_s += host.boottime_s() - begun_s
                newly_blocked += record.name not in self._blocked
                self._defer(record, error, is_named=newly_blocked <= MAX_NAMED)
            except LedgerUnavailable:
                raise
            except Exception as error:  # noqa: BLE001 - told by _stumbled
                # One that cannot be read or stored must not stop the others.
                stumbled = True
                self._stumbled(record, error)
        if newly_blocked > MAX_NAMED:
            log.warning("More schedules wait for locks and are tried again", schedules=newly_blocked - MAX_NAMED)
        if woken:
            self._ledger.notify({f"queue:{queue}" for queue in woken})
        if stumbled:
            return LONGEST_PAUSE_S
        if fired:
            return 0.0
        if self._blocked:
            again_s = min(at_s for at_s, _ in self._blocked.values()) - host.boottime_s()
            next_s = LOOK_EVERY_S if found.next_in_s is None else found.next_in_s
            # At least half of the time is left to others who use this connection.
            return min(max(again_s, waited_s, 0.01), max(next_s, 0.0))
        return LOOK_EVERY_S if found.next_in_s is None else min(max(found.next_in_s, 0.0), LOOK_EVERY_S)

    def _fire(self, record: ScheduleRecord, now: float, wait_s: float) -> set[str]:
        """Fire one schedule; give the queues in which there is work by it."""
        decided = due_runs(record.timing, record.catch_up, record.next_at, record.last_at, now)
        kind, message = _news(record, decided)
        jobs = tuple(job_for(record, tick) for tick in decided.ticks)
        last_at = decided.ticks[-1] if decided.ticks else None
        if decided.set_back:
            last_at = now
        firing = Firing(record.name, record.version, decided.next_at, last_at, jobs, kind, message)
        ids = self._ledger.schedules.fire(firing, wait_s)
        if ids is None:
            return set()
        for tick in decided.ticks:
            self._counters.observe(SCHEDULE_DELAY, max(0.0, now - tick))
        if kind is not None:
            log.warning(message, schedule=record.name)
        return {job.queue for job in jobs}

    def _defer(self, record: ScheduleRecord, error: LedgerBusy, *, is_named: bool) -> None:
        _, pause_s = self._blocked.get(record.name, (0.0, 0.0))
        if not pause_s and is_named:
            log.warning("A schedule waits for a lock and is tried again", schedule=record.name, error=str(error))
        pause_s = min(max(FIRST_PAUSE_S, pause_s * 2), LONGEST_BLOCKED_S)
        self._blocked[record.name] = (host.boottime_s() + pause_s, pause_s)

    def _stumbled(self, record: ScheduleRecord, error: Exception) -> None:
        if self._complained.get(record.name) != record.version:
            self._complained[record.name] = record.version
            log.error("A schedule cannot be fired", schedule=record.name, error=f"{type(error).__name__}: {error}")

    def _run(self) -> None:
        while not self._stopping:
            try:
                wait_s = self._shared(self.step())
                self._failures = 0
            except LedgerUnavailable as error:
                wait_s = self._paused(error)
            except Exception as error:
                # A clock that stops of a surprise is a schedule that silently ends.
                if not isinstance(error, LedgerError):
                    log.exception("The clock of schedules stumbled and goes on")
                wait_s = self._paused(error)
            if not self._stopping:
                self._wake.wait(wait_s)
            self._wake.clear()

    def _paused(self, error: Exception) -> float:
        if self._failures == 0 and not self._stopping:
            log.warning("Schedules cannot be looked at; trying on", error=str(error))
        self._failures += 1
        return min(FIRST_PAUSE_S * 2.0 ** min(self._failures, 10), LONGEST_PAUSE_S) * jitter.uniform(0.5, 1.0)

    def _shared(self, wait_s: float) -> float:
        """Of a crowd let a few come for the tick and the others later, so that a thousand do not ask at once."""
        if wait_s == 0.0:
            return 0.0
        now_s = host.boottime_s()
        if now_s >= self._count_s:
            states = self._ledger.workers.fleet().workers
            self._workers = max(1, sum(number for state, number in states.items() if state in LIVE_STATES))
            self._count_s = now_s + COUNT_EVERY_S * jitter.uniform(1.0, 2.0)
        if self._workers <= SCHEDULERS or jitter.random() < SCHEDULERS / self._workers:
            return wait_s
        return wait_s + SECOND_LINE_S + jitter.uniform(0.0, self._workers / ASKING_PER_S)


def job_for(record: ScheduleRecord, tick: float) -> NewJob:
    """Give the job of a tick: it knows which one it is for."""
    job = unpack_job(record.job)
    payload = with_fire_time(job.payload, tick) if job.payload_type == JSON else job.payload
    return msgspec.structs.replace(job, payload=payload, enqueued_by=enqueued_by(record.name, tick))


def _news(record: ScheduleRecord, decided: DueRuns) -> tuple[str | None, str]:
    """Say what is worth an event: a plain tick is none."""
    if decided.set_back:
        return "schedule_set_back", (
            f"Schedule {record.name!r} had ticked at {fire_time_text(record.last_at or 0.0)}, which is yet to come: "
            "the clock was set back. It goes on from now."
        )
    if decided.missed:
        since = fire_time_text(record.next_at or 0.0)
        taken = f"{len(decided.ticks)} made up for" if decided.ticks else "none made up for"
        many = "at least " if decided.many else ""
        return "schedule_missed", (
            f"Schedule {record.name!r} missed {many}{decided.missed} of its ticks since {since} (catch_up="
            f"{record.catch_up}): {taken}"
        )
    return None, ""
