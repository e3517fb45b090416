"""A call that is on its way: what was asked, and the promise of its answer."""

import os
from concurrent.futures import Future
from typing import Any

import cbor2

from unstuck.errors import CallFailed, PayloadError, ReplyTimeout
from unstuck.mdp.protocol import MAX_CORRELATION_BYTES

ID_BYTES = 12


class PendingCall:
    """Given by `submit`; `result()` waits for the reply."""

    def __init__(
        self,
        service: str,
        body: list[bytes],
        timeout_s: float,
        *,
        idempotency_key: str | None = None,
        priority: int | None = None,
        job_id: str | None = None,
        concurrency_key: str | None = None,
    ) -> None:
        self.service = service
        self.body = body
        self.timeout_s = timeout_s
        self.idempotency_key = idempotency_key
        self.job_id = job_id
        """Our own, if we gave one; else the broker's, as soon as a notice named it."""
        self.ledger_id: int | str | None = None
        """The broker's, as soon as a notice named it."""
        self.id = os.urandom(ID_BYTES)
        options = {
            "idempotency_key": idempotency_key,
            "priority": priority,
            "job_id": job_id,
            "concurrency_key": concurrency_key,
        }
        given = {name: value for name, value in options.items() if value is not None}
        if idempotency_key == "":
            raise PayloadError("An empty idempotency_key tells no call from another. Leave it out, or give it a text.")
        self.correlation = cbor2.dumps({"id": self.id, **given})
        if len(self.correlation) > MAX_CORRELATION_BYTES:
            raise PayloadError(
                f"The options of this call take {len(self.correlation):,} bytes, and a broker takes at most "
                f"{MAX_CORRELATION_BYTES:,}: {', '.join(given)}. Use shorter texts, such as a hash."
            )
        self.expires_at_s: float | None = None
        """None while its clock does not run yet."""
        self.future: Future[list[bytes]] = Future()
        # From here on nobody cancels it: who no longer waits does not take the request back.
        self.future.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> list[bytes]:
        """Give the frames of the reply. With `timeout` it waits at most so long, and may be asked again.

        Raises `ReplyTimeout`, or `CallFailed` when the broker said that there will be no reply."""
        try:
            return self.future.result(timeout)
        except ReplyTimeout:
            raise
        except TimeoutError:
            raise ReplyTimeout(f"No reply of {self.service} within {timeout:g}s; it may still come.") from None

    def done(self) -> bool:
        return self.future.done()

    def answer(self, body: list[bytes]) -> None:
        if not self.future.done():
            self.future.set_result(body)

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)

    def expire(self) -> None:
        self.fail(
            ReplyTimeout(
                f"No reply of {self.service} within {self.timeout_s:g}s. The request may still be carried out: give it "
                "an idempotency_key before you send it again."
            )
        )

    def learn(self, notice: dict[str, Any]) -> None:
        """Take from a notice what it says of this call; the last word on it ends it."""
        job_id, ledger_id = notice.get("job_id"), notice.get("ledger_id")
        if isinstance(ledger_id, int | str):
            self.ledger_id = ledger_id
        if self.job_id is None and isinstance(job_id, int | str):
            self.job_id = str(job_id)
        if notice.get("final") is True:
            self.fail(failure(self.service, notice))


def failure(service: str, notice: dict[str, Any]) -> CallFailed:
    """Give the exception that a final notice becomes."""
    return CallFailed(
        str(notice.get("message") or "The broker gave this request up."),
        service=service,
        error=str(notice.get("error") or "UNKNOWN"),
        **{name: notice.get(name) for name in ("job_id", "ledger_id", "attempt", "cause")},
    )
