"""Run the maintenance loop as a process of its own, or one pass of it."""

import threading
import time
from collections.abc import Callable

from unstuck import host
from unstuck.config import Recovery
from unstuck.domain.watch_clock import grace_s
from unstuck.ledger.contract import Ledger
from unstuck.ledger.metrics_writer import MetricsWriter
from unstuck.maintenance.loop import Loop, log
from unstuck.maintenance.retention import ONCE_S
from unstuck.maintenance.scheduler import Scheduler
from unstuck.metrics.counters import Counters
from unstuck.notify.wakeups import WakeupListener
from unstuck.recovery import leftovers
from unstuck.recovery.evidence import patience_s
from unstuck.recovery.reap import Reaper
from unstuck.recovery.result import SweepResult


class ScheduleWakeUps:
    """Passes on to the scheduler what a process hears by itself."""

    def __init__(self) -> None:
        self.kick: Callable[[], None] = lambda: None

    def heard(self, words: frozenset[str]) -> None:
        if "schedules" in words:
            self.kick()


def run_daemon(
    ledger: Ledger,
    recovery: Recovery,
    stop: threading.Event,
    *,
    by: str = "reaper",
    counters: Counters | None = None,
    wakeups: ScheduleWakeUps | None = None,
) -> None:
    """Keep watch until `stop` is set: `unstuck reaper`. Without `wakeups` it listens by itself."""
    reaper = Reaper(ledger, recovery, by=by, counters=counters)
    metrics_writer = MetricsWriter(ledger, reaper.counters, recovery.heartbeat_interval_s)
    reaper_loop = Loop(reaper, metrics_writer)
    # It has no code of an app: of schedules it fires those that operators made.
    scheduler = Scheduler(ledger, (), reaper.counters)
    listener = None
    if wakeups is None:
        wakeups = ScheduleWakeUps()
        # A schedule that changed before it listened is looked up.
        listener = WakeupListener(lambda: ledger, wakeups.heard, scheduler.kick)
    wakeups.kick = scheduler.kick
    reaper_loop.start()
    scheduler.start()
    if listener is not None:
        listener.start()
    try:
        stop.wait()
    finally:
        if listener is not None:
            listener.stop()
        scheduler.stop()
        reaper_loop.stop()
        scheduler.join()
        reaper_loop.join()
        metrics_writer.flush()


def run_once(
    ledger: Ledger, recovery: Recovery, *, by: str = "reaper", pause: Callable[[float], object] | None = None
) -> SweepResult:
    """Do one round for cron: `unstuck reaper --once`. Raise LedgerUnavailable if the ledger cannot be reached.

    It remembers no earlier round, so it cannot know whether workers were silent or could not write. If no other reaper
    kept watch, it gives silent workers the time to be heard, and then counts all of their silence."""
    reaper = Reaper(ledger, recovery, by=by)
    if silent := reaper.unwatched():
        wait_s = max(grace_s(patience_s(worker), worker.heartbeat_interval_s) for worker in silent)
        log.warning("Some workers look silent; looking again before the verdict", workers=len(silent), wait_s=wait_s)
        (pause or threading.Event().wait)(wait_s)
        reaper.count_unwatched(max(worker.since_beat_s for worker in silent) + wait_s)
    try:
        done = reaper.sweep(ticket=False)
        _finish_retention(reaper, done)
        leftovers.remove_leftovers(ledger)
        return done
    finally:
        MetricsWriter(ledger, reaper.counters).flush()


def _finish_retention(reaper: Reaper, done: SweepResult) -> None:
    """Remove the backlog of retention for a bounded time: nothing goes on between two rounds of cron."""
    deadline_s = host.boottime_s() + ONCE_S
    while done.next_batch_in_s is not None and host.boottime_s() < deadline_s:
        time.sleep(done.next_batch_in_s)
        batch = reaper.keep_house()
        done.pruned += batch.pruned
        done.next_batch_in_s = batch.next_batch_in_s
