"""A client of the ZeroMQ door, for any Majordomo broker; a broker of ours also tells it of deaths."""

from types import TracebackType
from typing import Any, Self

from unstuck.domain.errors import CallFailed, ConfigError, JobNotFound
from unstuck.mdp import frames
from unstuck.mdp.bodies import body_of, map_of
from unstuck.mdp.calling import PendingCall
from unstuck.mdp.conversation import EVENTS, Conversation
from unstuck.mdp.line import Line
from unstuck.mdp.notices import Callback, Hears, Teller
from unstuck.mdp.sockets import CurveKeys

DEFAULT_TIMEOUT_S = 2.5


class Client(Hears):
    """Call services. Any thread may; a process that was forked opens its own.

    With `enable_notifications` a broker of ours tells of deaths: see `handle_error_notification`, which runs in a
    thread of its own. `show_popups` is for clients with a screen."""

    def __init__(
        self,
        endpoint: str,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
        enable_notifications: bool = True,
        show_popups: bool = True,
        log_errors: bool = True,
        on_worker_crashed: Callback | None = None,
        on_no_workers: Callback | None = None,
        curve: CurveKeys | None = None,
        identity: bytes | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.timeout = checked_timeout(timeout)
        self.enable_notifications = enable_notifications
        self.show_popups = show_popups
        self.log_errors = log_errors
        self.on_worker_crashed = on_worker_crashed
        self.on_no_workers = on_no_workers
        if identity is not None and (len(identity) < frames.LEAST_IDENTITY_BYTES or identity[:1] == b"\x00"):
            least = frames.LEAST_IDENTITY_BYTES
            raise ConfigError(f"An identity has at least {least} bytes and does not begin with zero, not {identity!r}.")
        # Without events there is still the correlation of requests and replies.
        self._conversation = Conversation(EVENTS if enable_notifications else ())
        # By name, when it is called: a subclass, or who sets the attribute later, is heard too.
        self._teller = Teller(lambda error: self.handle_error_notification(error))
        self._line = Line(endpoint, curve, identity, self._conversation, self._teller.tell)

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
        if not frames.is_service(service.encode()):
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
        self._line.submit(call)
        return call

    def mmi(self, name: str, *body: object, timeout: float | None = None) -> list[bytes]:
        """Ask the broker itself: `client.mmi("service", b"echo")` gives `[b"200"]` if somebody serves it."""
        return self.call(f"mmi.{name}", *body, timeout=timeout)

    def query(self, job_id: int | str, *, timeout: float | None = None) -> dict[str, Any]:
        """Ask what became of a job, also one of an earlier life of this client. For a broker of ours."""
        return read_status(job_id, self.mmi("status", str(job_id).encode(), timeout=timeout))

    def close(self) -> None:
        """End the connection. Calls that still wait fail with `LineClosed`."""
        self._line.close()
        self._teller.close()

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
    if code == frames.NOT_FOUND:
        raise JobNotFound(f"The broker knows no job {job_id}.")
    status = map_of(body[-1]) if body else None
    if status is None:
        text = f"The broker cannot say what became of a job: it answers {code[:20]!r}"
        raise CallFailed(text, service="mmi.status", error="NOT_IMPLEMENTED", job_id=job_id)
    return status
