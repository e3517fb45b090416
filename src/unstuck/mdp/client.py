"""The ZeroMQ client: calls, replies, and crash notifications with their handler thread."""

import queue
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from unstuck.errors import CallFailed, ConfigError, JobNotFound
from unstuck.logs import logger
from unstuck.mdp import protocol
from unstuck.mdp.client_session import EVENTS, ClientSession
from unstuck.mdp.client_thread import ClientThread
from unstuck.mdp.connection import CurveKeys
from unstuck.mdp.pending_call import PendingCall
from unstuck.mdp.protocol import body_of, map_of

log = logger("unstuck.mdp.client")

WORKER_CRASHED = "WORKER_CRASHED"
NO_WORKERS = "NO_WORKERS"
MAX_UNTOLD = 10_000

Callback = Callable[[str, str], Any]


class NotificationHandler:
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


class HandlerThread:
    """Hands notices to a handler, one at a time, in a thread of its own: a handler may take its time, and may call."""

    def __init__(self, handler: Callable[[dict[str, Any]], None]) -> None:
        self._handler = handler
        self._untold: queue.Queue[dict[str, Any] | None] = queue.Queue(MAX_UNTOLD)
        self._thread: threading.Thread | None = None

    def tell(self, notice: dict[str, Any]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="unstuck-mdp-notifications", daemon=True)
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


DEFAULT_TIMEOUT_S = 2.5


class Client(NotificationHandler):
    """Call services. Any thread may; a process that was forked opens its own.

    With `enable_notifications` a broker of ours tells of deaths: see `handle_error_notification`, which runs in a
    thread of its own."""

    def __init__(
        self,
        endpoint: str,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
        enable_notifications: bool = True,
        log_errors: bool = True,
        on_worker_crashed: Callback | None = None,
        on_no_workers: Callback | None = None,
        curve: CurveKeys | None = None,
        identity: bytes | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.timeout = checked_timeout(timeout)
        self.enable_notifications = enable_notifications
        self.log_errors = log_errors
        self.on_worker_crashed = on_worker_crashed
        self.on_no_workers = on_no_workers
        if identity is not None and (len(identity) < protocol.LEAST_IDENTITY_BYTES or identity[:1] == b"\x00"):
            least = protocol.LEAST_IDENTITY_BYTES
            raise ConfigError(f"An identity has at least {least} bytes and does not begin with zero, not {identity!r}.")
        # Without events there is still the correlation of requests and replies.
        self._conversation = ClientSession(EVENTS if enable_notifications else ())
        # By name, when it is called: a subclass, or who sets the attribute later, is heard too.
        self._notifications = HandlerThread(lambda error: self.handle_error_notification(error))
        self._thread = ClientThread(endpoint, curve, identity, self._conversation, self._notifications.tell)

    @property
    def status(self) -> bool:
        """Whether the broker answers: False until its first word, and after a call that it did not answer in time."""
        return self._conversation.status

    def call(
        self,
        service: str,
        *body: object,
        timeout: float | None = None,
        idempotency_key: str | None = None,
        priority: int | None = None,
        job_id: str | None = None,
        concurrency_key: str | None = None,
    ) -> list[bytes]:
        """Send a request and give the frames of its reply. Bytes are sent as they are, other values as CBOR.

        Raises `ReplyTimeout` when there is none within `timeout` seconds (the client's own if not given), `CallFailed`
        when the broker says that there will be none."""
        return self.submit(
            service,
            *body,
            timeout=timeout,
            idempotency_key=idempotency_key,
            priority=priority,
            job_id=job_id,
            concurrency_key=concurrency_key,
        ).result()

    def submit(
        self,
        service: str,
        *body: object,
        timeout: float | None = None,
        idempotency_key: str | None = None,
        priority: int | None = None,
        job_id: str | None = None,
        concurrency_key: str | None = None,
    ) -> PendingCall:
        """Send a request and do not wait: `result()` of what it gives does. Many may be on their way at once.

        The keys, the priority and the id are for a broker of ours; others never see them. A timeout
        of `math.inf` is patience without end."""
        if not protocol.is_service(service.encode()):
            raise ConfigError(f"A service is printable ASCII without blanks, not {service!r}.")
        call = PendingCall(
            service,
            body_of(body),
            self.timeout if timeout is None else checked_timeout(timeout),
            idempotency_key=idempotency_key,
            priority=priority,
            job_id=job_id,
            concurrency_key=concurrency_key,
        )
        self._thread.submit(call)
        return call

    def mmi(self, name: str, *body: object, timeout: float | None = None) -> list[bytes]:
        """Ask the broker itself: `client.mmi("service", b"echo")` gives `[b"200"]` if somebody serves it."""
        return self.call(f"mmi.{name}", *body, timeout=timeout)

    def query(self, job_id: int | str, *, timeout: float | None = None) -> dict[str, Any]:
        """Ask what became of a job, also one of an earlier life of this client. For a broker of ours."""
        return read_status(job_id, self.mmi("status", str(job_id).encode(), timeout=timeout))

    def close(self) -> None:
        """End the connection. Calls that still wait fail with `ClientClosed`."""
        self._thread.close()
        self._notifications.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def checked_timeout(timeout: float) -> float:
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
        raise ConfigError(f"A timeout is a number of seconds above zero, not {timeout!r}.")
    return float(timeout)


def read_status(job_id: int | str, body: list[bytes]) -> dict[str, Any]:
    """Read the answer to `mmi.status`."""
    code = body[0] if body else b""
    if code == protocol.NOT_FOUND:
        raise JobNotFound(f"The broker knows no job {job_id}.")
    status = map_of(body[-1]) if body else None
    if status is None:
        text = f"The broker cannot say what became of a job: it answers {code[:20]!r}"
        raise CallFailed(text, service="mmi.status", error="NOT_IMPLEMENTED", job_id=job_id)
    return status
