"""Hold what a process needs to talk to the ledger: made on first use, made anew after a fork."""

import os
import threading
import weakref
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from unstuck.config import Settings, ledger_name
from unstuck.errors import JobNotFound
from unstuck.logs import logger

if TYPE_CHECKING:
    from unstuck.client.batcher import EnqueueBatcher
    from unstuck.client.no_workers import NoWorkerCheck
    from unstuck.client.operator import Operator
    from unstuck.ledger.contract import Ledger
    from unstuck.notify.feed import EventFeed
    from unstuck.notify.results import ResultWatcher
    from unstuck.notify.wakeups import WakeupSender

log = logger("unstuck.client")


@dataclass(frozen=True)
class ClientServices:
    ledger: "Ledger"
    batcher: "EnqueueBatcher"
    wakeups: "WakeupSender"
    watcher: "ResultWatcher"
    operator: "Operator"
    client_operator: "Operator"
    """Acts for job handles; events and the audit log name it "client"."""
    feed: "EventFeed"
    no_worker_check: "NoWorkerCheck"


class ClientRuntime:
    """Create the services that the client parts of an app share; `services()` returns those of this process."""

    def __init__(self, settings: Settings, note: str = "") -> None:
        self.settings = settings
        self._note = note
        self._lock = threading.Lock()
        self._parts: ClientServices | None = None
        _runtimes.add(self)

    def services(self) -> ClientServices:
        parts = self._parts
        if parts is not None:
            return parts
        with self._lock:
            if self._parts is None:
                self._parts = _make(self.settings)
                note = self.take_note()
                if note:
                    log.warning(note)
            return self._parts

    def take_note(self) -> str:
        """Return what there is to say about the choice of the ledger; only once."""
        note, self._note = self._note, ""
        return note

    def wake_listeners(self) -> None:
        """Have everybody who listens to events look now, whether there is news or not."""
        if self._parts is not None:
            self._parts.feed.wake_all()

    def move(self, settings: Settings) -> None:
        """Use other settings from now on; connections are opened again on the next use."""
        self.close()
        self.settings = settings
        self._note = ""

    def close(self) -> None:
        with self._lock:
            parts, self._parts = self._parts, None
        if parts is not None:
            parts.wakeups.flush()
            parts.ledger.close()

    def forget_after_fork(self) -> None:
        """Forget everything in a forked child: its locks, threads and connections are the parent's."""
        if self._parts is not None:
            # Kept alive on purpose: closing an inherited connection would disturb the parent's.
            _abandoned.append(self._parts)
        self._parts = None
        self._lock = threading.Lock()


def _make(settings: Settings) -> ClientServices:
    # Much to load, and not needed where tasks are only defined: in each fork server, for one.
    from unstuck.client.batcher import EnqueueBatcher
    from unstuck.client.no_workers import NoWorkerCheck
    from unstuck.client.operator import Operator
    from unstuck.ledger.open import ready_ledger
    from unstuck.notify.feed import EventFeed
    from unstuck.notify.results import ResultWatcher
    from unstuck.notify.wakeups import WakeupSender

    ledger = ready_ledger(settings)
    operator, client_operator = Operator(ledger, settings), Operator(ledger, settings, by="client")
    watcher = ResultWatcher(
        lambda: ledger,
        operator.explain_wait,
        lambda job_id: JobNotFound(f"Job {job_id} does not exist: it was never stored, or was pruned after it ended."),
    )
    feed, no_worker_check = EventFeed(lambda: ledger), NoWorkerCheck(ledger, ledger_name(settings))
    # It waits for other sessions by itself, and lets other enqueues through meanwhile.
    batcher = EnqueueBatcher(partial(ledger.jobs.enqueue, patience_s=0.0))
    return ClientServices(
        ledger, batcher, WakeupSender(ledger.notify), watcher, operator, client_operator, feed, no_worker_check
    )


_runtimes: "weakref.WeakSet[ClientRuntime]" = weakref.WeakSet()
_abandoned: list[Any] = []


def _after_fork() -> None:
    for runtime in list(_runtimes):
        runtime.forget_after_fork()


os.register_at_fork(after_in_child=_after_fork)
