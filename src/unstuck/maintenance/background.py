"""Keep watch from a process that serves something else: the HTTP API, a mounted web app, the ZeroMQ broker."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, closing

from unstuck import logs
from unstuck.config import Recovery, Settings
from unstuck.domain.jitter import jitter
from unstuck.errors import LedgerError, NoLedger
from unstuck.ledger.contract import Ledger
from unstuck.ledger.open import open_ledger
from unstuck.maintenance.service import ScheduleWakeUps, run_daemon
from unstuck.metrics.counters import Counters

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0

log = logs.logger("unstuck.recovery")


class BackgroundReaper:
    """`unstuck reaper` in threads of this process. A ledger that is away at the start is tried again until it is there.

    `opened` gives the ledger. It should have connections of its own, so that a sweep over ten thousand workers delays
    no request. A process that hears wake-ups by itself passes them on with `wakeups`."""

    def __init__(
        self,
        opened: Callable[[], AbstractContextManager[Ledger]],
        recovery: Recovery,
        *,
        by: str,
        counters: Counters | None = None,
        wakeups: ScheduleWakeUps | None = None,
    ) -> None:
        self._opened = opened
        self._recovery = recovery
        self._by = by
        self._counters = counters
        self._wakeups = wakeups
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to watch, and return at once; a second call does nothing."""
        with self._lock:
            if self._thread is None and not self._stop.is_set():
                self._thread = threading.Thread(target=self._run, name="unstuck-background-reaper", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Ask it to end after the round it is in; never blocks."""
        self._stop.set()

    def join(self, timeout_s: float | None = None) -> None:
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        failures = 0
        while not self._stop.is_set():
            try:
                with self._opened() as ledger:
                    ledger.check_schema()
                    run_daemon(
                        ledger,
                        self._recovery,
                        self._stop,
                        by=self._by,
                        counters=self._counters,
                        wakeups=self._wakeups,
                    )
            except LedgerError as error:
                # No ledger means no worker to watch. Whoever uses the ledger first creates it.
                if failures == 0 and not isinstance(error, NoLedger):
                    log.warning("The reaper cannot use the ledger yet and keeps trying", error=str(error))
            except Exception:
                if failures == 0:
                    log.exception("The reaper could not start and tries again")
            failures += 1
            self._stop.wait(min(FIRST_PAUSE_S * 2.0 ** min(failures, 10), LONGEST_PAUSE_S) * jitter.uniform(0.5, 1.0))


def own_connections(settings: Settings) -> AbstractContextManager[Ledger]:
    """Open the ledger on connections that are closed with the block."""
    return closing(open_ledger(settings))
