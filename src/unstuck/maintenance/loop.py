"""Walk the rounds: tick, log, and outlive every outage. In each worker, in `unstuck up`, or as a daemon of its own."""

import math
import threading
from collections.abc import Callable

from unstuck import host, logs
from unstuck.domain.jitter import jitter
from unstuck.domain.states import LIVE_STATES
from unstuck.errors import LedgerBusy, LedgerUnavailable
from unstuck.ledger.metrics_writer import MetricsWriter
from unstuck.recovery import leftovers
from unstuck.recovery.reap import Reaper
from unstuck.recovery.result import SweepResult

MAX_BACKOFF_S = 5.0
# Many reapers share one ticket, and a thousand idle workers must not ask for it a thousand times a second. In a
# crowd each asks less often: about four per interval in all. In a small fleet everybody asks every time, so that
# the death of the one who always wins costs no more than one interval. Whoever won asks every time in a crowd too:
# after a hang or a sleep all may ask at the same moments, and nobody in between would keep the watch.
ASKING_PER_INTERVAL = 4.0
SLOWEST = 5.0
COUNT_AFTER_LOSSES = 10
COUNT_EVERY_S = 60.0
PROMOTE_AT_LEAST_S = 0.02

log = logs.logger("unstuck.maintenance")


class Loop:
    """A thread that calls `reaper.sweep()` every `check_interval`, if it wins the ticket.

    `metrics_writer` is for processes without a heartbeat thread, which writes the metrics of a worker."""

    def __init__(self, reaper: Reaper, metrics_writer: MetricsWriter | None = None) -> None:
        self._reaper = reaper
        self._metrics_writer = metrics_writer
        self._interval_s = reaper.recovery.check_interval_s
        self._workers = 1
        self._won = False
        """Whether the last round was ours."""
        self._losses = 0
        self._count_s = 0.0
        self._failures = 0
        self._tick_s = self._turned_s = host.boottime_s()
        self._promote_s: float | None = None
        self._batch_s: float | None = None
        """When retention goes on."""
        self._contact_s = math.inf
        self._tidy_s = 0.0
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._stopping = False
        reaper.wake = self.wake
        self._thread = threading.Thread(target=self._run, name="unstuck-maintenance", daemon=True)

    def start(self) -> None:
        self._tick_s = host.boottime_s()
        self._thread.start()

    def stop(self) -> None:
        """Ask it to end after the round it is in; safe from a signal handler's thread."""
        self._stopping = True
        self._wake.set()

    def join(self, timeout_s: float | None = None) -> None:
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    @property
    def cut_off(self) -> bool:
        """The last round did not reach the ledger, or failed in it."""
        return self._failures > 0

    def turns(self, now_s: float, limit_s: float) -> bool:
        """Say whether he walks: his thread lives, and went round within the limit or sleeps until a known time."""
        return self._thread.is_alive() and now_s < max(self._turned_s, self._tick_s) + limit_s

    def kick(self) -> None:
        """Walk a round now: somebody heard that something happened."""
        with self._lock:
            self._tick_s = min(self._tick_s, host.boottime_s())
        self._wake.set()

    def wake(self, done: SweepResult) -> None:
        """Note from a burial beside our rounds when the jobs that it put back become due."""
        if done.deaths:
            # Where one died others may follow, and fewer are left to look.
            self._workers = 1
        if done.next_due_in_s is not None:
            self._promote_in(done.next_due_in_s)
            self._wake.set()

    def step(self) -> float:
        """Do what is due and give the time until something is again: one lap of his thread."""
        now_s = self._turned_s = host.boottime_s()
        if now_s >= self._tick_s:
            self._tick(now_s)
        elif self._promote_s is not None and now_s >= self._promote_s:
            self._promote_s = None
            self._guarded(self._reaper.promote)
        elif now_s >= self._contact_s:
            self._contact_s = math.inf
            self._guarded(self._touch)
        elif self._batch_s is not None and now_s >= self._batch_s:
            self._batch_s = None
            self._guarded(self._reaper.keep_house)
        elif now_s >= self._tidy_s and not self._failures:
            self._tidy_s = now_s + leftovers.EVERY_S
            self._tidy()
        with self._lock:
            tidy_s = None if self._failures else self._tidy_s
            planned_s = (self._tick_s, self._contact_s, self._promote_s, self._batch_s, tidy_s)
            next_s = min(at_s for at_s in planned_s if at_s is not None)
        return max(0.0, next_s - host.boottime_s())

    # ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            wait_s = self.step()
            if not self._stopping:
                self._wake.wait(wait_s)
            self._wake.clear()

    def _tick(self, now_s: float) -> None:
        done = self._guarded(self._round)
        if done is not None and done.counts():
            log.debug("Swept", skipped=done.skipped, watched=done.watched, **done.counts())
        if self._metrics_writer is not None:
            self._metrics_writer.tend()
        wait_s = self._interval_s * self._pace() if done is not None else self._backoff_s()
        now_s = host.boottime_s()
        with self._lock:
            self._tick_s = now_s + wait_s
        self._plan_contact(now_s, wait_s)

    def _tidy(self) -> None:
        try:
            leftovers.remove_leftovers(self._reaper.ledger)
        except Exception as error:  # noqa: BLE001 - a few pages of memory are not worth a round
            log.warning("The shared memory of dead workers could not be looked through", error=str(error))

    def _touch(self) -> SweepResult:
        """Reach the ledger between two rounds, so that the watch has no holes that an outage could hide in."""
        self._reaper.keep_watch()
        now_s = host.boottime_s()
        self._plan_contact(now_s, self._tick_s - now_s)
        return SweepResult()

    def _plan_contact(self, now_s: float, wait_s: float) -> None:
        # In a crowd the others reach it meanwhile.
        often = self._pace() <= 1.0
        contact_s = min(wait_s, self._reaper.contact_in_s(now_s)) if often else wait_s
        self._contact_s = now_s + contact_s if contact_s < wait_s else math.inf
        self._reaper.watch.rest(now_s, contact_s)

    def _pace(self) -> float:
        return 1.0 if self._won else pace(self._workers)

    def _round(self) -> SweepResult:
        done = self._reaper.sweep()
        self._won = done.skipped != "ticket"
        if self._won:
            self._workers, self._losses = done.watched, 0
            return done
        self._losses += 1
        now_s = host.boottime_s()
        # Whoever keeps losing learns nothing of the fleet from his rounds.
        if self._losses >= COUNT_AFTER_LOSSES and now_s >= self._count_s:
            states = self._reaper.ledger.workers.fleet().workers
            self._workers = sum(number for state, number in states.items() if state in LIVE_STATES)
            self._count_s = now_s + max(COUNT_EVERY_S, self._workers / ASKING_PER_INTERVAL) * jitter.uniform(1.0, 2.0)
        return done

    def _guarded(self, act: Callable[[], SweepResult]) -> SweepResult | None:
        watch = self._reaper.watch
        try:
            done = act()
        except LedgerBusy as error:
            # The ledger answered: this is no outage. What was in the way is tried again in the next round.
            self._reaper.say_deferred("its round", error)
            done = SweepResult()
        except LedgerUnavailable as error:
            watch.lost()
            if self._failures == 0:
                # Once per outage: a line per tick would bury what matters.
                log.warning("The reaper cannot reach the ledger and keeps trying", error=str(error))
            self._failures += 1
            return None
        except Exception:
            # A reaper thread that ended by an unexpected error would leave every later death unseen.
            if self._failures == 0 and not self._stopping:
                log.exception("A sweep failed; the next one tries again")
            self._failures += 1
            return None
        if self._failures:
            log.info("The reaper can reach the ledger again", failed_rounds=self._failures)
            self._failures = 0
        if done.next_due_in_s is not None:
            self._promote_in(done.next_due_in_s)
        if done.next_batch_in_s is not None:
            self._batch_s = host.boottime_s() + done.next_batch_in_s
        return done

    def _promote_in(self, delay_s: float) -> None:
        at_s = host.boottime_s() + max(delay_s, PROMOTE_AT_LEAST_S)
        with self._lock:
            self._promote_s = at_s if self._promote_s is None else min(self._promote_s, at_s)

    def _backoff_s(self) -> float:
        longest_s = max(MAX_BACKOFF_S, self._interval_s)
        return min(self._interval_s * 2.0 ** min(self._failures, 10), longest_s) * jitter.uniform(0.5, 1.0)


def pace(workers: int) -> float:
    """Return how many intervals a reaper in a fleet of this size waits between two tries if others win."""
    return min(max(workers / ASKING_PER_INTERVAL, 1.0), SLOWEST)
