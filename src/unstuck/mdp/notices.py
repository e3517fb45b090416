"""Tell the owner of a client what the broker said unasked: a worker died, or nobody is there."""

import queue
import threading
from collections.abc import Callable
from typing import Any

from unstuck.logs import logger

log = logger("unstuck.mdp.client")

WORKER_CRASHED = "WORKER_CRASHED"
NO_WORKERS = "NO_WORKERS"
MAX_UNTOLD = 10_000

Callback = Callable[[str, str], Any]


class Hears:
    """What clients of all kinds do with news: log them, and call who wants to know."""

    log_errors: bool = True
    on_worker_crashed: Callback | None = None
    """Called with the service and the message."""
    on_no_workers: Callback | None = None

    def handle_error_notification(self, error: dict[str, Any]) -> None:
        """Override this to do more, or other things. `error` has the keys `error`, `service`, `message`, `timestamp`,
        and where they are known `job_id`, `ledger_id`, `attempt`, `final`, `cause`, `suppressed`."""
        kind, service, message = (str(error.get(name, "")) for name in ("error", "service", "message"))
        if self.log_errors:
            # Their names begin alike, so that none of them is taken for a field of the log itself.
            facts = {f"notice_{name}": value for name, value in error.items() if name not in ("message", "service")}
            log.warning(f"{service}: {message}", service=service, **facts)
        self._tell(kind, service, message)

    def _tell(self, kind: str, service: str, message: str) -> None:
        callback = {WORKER_CRASHED: self.on_worker_crashed, NO_WORKERS: self.on_no_workers}.get(kind)
        if callback is not None:
            callback(service, message)


class Teller:
    """Hands notices to a handler, one at a time, in a thread of its own: a handler may take its time, and may call."""

    def __init__(self, handler: Callable[[dict[str, Any]], None]) -> None:
        self._handler = handler
        self._untold: queue.Queue[dict[str, Any] | None] = queue.Queue(MAX_UNTOLD)
        self._thread: threading.Thread | None = None

    def tell(self, notice: dict[str, Any]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="unstuck-mdp-notices", daemon=True)
            self._thread.start()
        try:
            self._untold.put_nowait(notice)
        except queue.Full:
            log.warning("A notice was dropped: the handler of this client is too slow", unheard=MAX_UNTOLD)

    def close(self) -> None:
        """Tell nothing more than what was heard."""
        if self._thread is None:
            return
        try:
            self._untold.put_nowait(None)
        except queue.Full:
            return

    def _run(self) -> None:
        while (notice := self._untold.get()) is not None:
            try:
                self._handler(notice)
            except Exception:
                log.exception("handle_error_notification raised")
