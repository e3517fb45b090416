"""A client of the ZeroMQ door for applications with a screen: deaths come as signals of Qt, and as popups."""

from typing import Any

try:
    from PySide6.QtCore import QObject, Signal
    from PySide6.QtWidgets import QMessageBox
except ModuleNotFoundError as error:
    from unstuck.desktop import DESKTOP_INSTALL_HINT
    from unstuck.errors import ConfigError

    raise ConfigError(f"{DESKTOP_INSTALL_HINT} ({error})") from error

from unstuck.desktop.popups import CrashedCalls, Popup, ThreadInbox, UnservedCalls, delete_in_own_thread
from unstuck.mailbox import Mailbox
from unstuck.mdp.client import DEFAULT_TIMEOUT_S, NO_WORKERS, WORKER_CRASHED, Client, NotificationHandler
from unstuck.mdp.connection import CurveKeys
from unstuck.mdp.pending_call import PendingCall


class NotifyingClient(QObject, NotificationHandler):
    """Calls services like `unstuck.mdp.Client`; what it is told reaches the thread that it lives in.

    `show_popups` and `log_errors` may be changed at any time."""

    workerCrashed = Signal(str, str)
    """The service, and the message."""
    noWorkersAvailable = Signal(str, str)
    """The service, and the message."""
    callEnded = Signal(object)
    """A `PendingCall` of `submit` that has its reply, or failed: `result()` no longer waits."""

    def __init__(
        self,
        endpoint: str,
        parent: QObject | None = None,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
        enable_notifications: bool = True,
        show_popups: bool = True,
        log_errors: bool = True,
        curve: CurveKeys | None = None,
        identity: bytes | None = None,
    ) -> None:
        super().__init__(parent)
        self.show_popups = show_popups
        self.log_errors = log_errors
        self._crashes, self._absences = CrashedCalls(), UnservedCalls()
        self.crash_popup = Popup("Worker Crashed", QMessageBox.Icon.Warning, self._crashes, self)
        self.absence_popup = Popup("No Workers Available", QMessageBox.Icon.Critical, self._absences, self)
        self._is_closed = False
        inbox = ThreadInbox(self)
        inbox.came.connect(self._take)
        self._mailbox = inbox.mailbox
        self.client = _Messenger(
            self._mailbox,
            endpoint,
            timeout=timeout,
            enable_notifications=enable_notifications,
            log_errors=log_errors,
            curve=curve,
            identity=identity,
        )
        # A parent that goes takes us with it, and asks nobody to close us.
        self.destroyed.connect(self.client.close)

    @property
    def status(self) -> bool:
        """Whether the broker answers, as `Client.status` says."""
        return self.client.status

    def submit(self, service: str, *body: object, **options: Any) -> PendingCall:
        """Send a request and do not wait: `callEnded` says when it has ended. Options as for `Client.submit`."""
        call = self.client.submit(service, *body, **options)
        mailbox = self._mailbox
        call.future.add_done_callback(lambda _: mailbox.post(call))
        return call

    def call(self, service: str, *body: object, **options: Any) -> list[bytes]:
        """Send a request and wait for its reply, as `Client.call` does. The event loop stands still meanwhile."""
        return self.client.call(service, *body, **options)

    def handle_error_notification(self, error: dict[str, Any]) -> None:
        """Log, emit and pop up what the broker told, in the thread of this object. Override it to do more, or other
        things; the keys are those of `Client.handle_error_notification`."""
        super().handle_error_notification(error)
        if not self.show_popups:
            return
        service, message, suppressed = str(error.get("service", "")), str(error.get("message", "")), _suppressed(error)
        if error.get("error") == WORKER_CRASHED:
            self._crashes.add(service, message, final=error.get("final") is True, count=1 + suppressed)
            self.crash_popup.show()
        elif error.get("error") == NO_WORKERS:
            self._absences.add(service, message, count=1 + suppressed)
            self.absence_popup.show()

    def close(self) -> None:
        """End the connection. Popups that are open stay until somebody has read them."""
        self._is_closed = True
        self.client.close()

    def _take(self, thing: PendingCall | dict[str, Any]) -> None:
        if isinstance(thing, PendingCall):
            self.callEnded.emit(thing)
        elif not self._is_closed:
            self.handle_error_notification(thing)

    def _tell(self, kind: str, service: str, message: str) -> None:
        super()._tell(kind, service, message)
        if kind == WORKER_CRASHED:
            self.workerCrashed.emit(service, message)
        elif kind == NO_WORKERS:
            self.noWorkersAvailable.emit(service, message)

    def __del__(self) -> None:
        delete_in_own_thread(self)


class _Messenger(Client):
    """Hands over what it is told, and does nothing else with it: its threads know nothing of Qt."""

    def __init__(self, mailbox: Mailbox, *given: Any, **settings: Any) -> None:
        # Before the line opens: the first word may come at once.
        self._mailbox = mailbox
        super().__init__(*given, **settings)

    def handle_error_notification(self, error: dict[str, Any]) -> None:
        self._mailbox.post(error)


def _suppressed(error: dict[str, Any]) -> int:
    """So many more were not told one by one."""
    count = error.get("suppressed")
    return count if isinstance(count, int) and count > 0 else 0
