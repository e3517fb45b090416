"""The client of the ZeroMQ door for programs with an event loop."""

import asyncio
from collections.abc import Awaitable, Generator
from types import TracebackType
from typing import Any, Self

from unstuck.mdp.client import Client, NotificationHandler, read_status
from unstuck.mdp.pending_call import PendingCall


class AsyncClient(NotificationHandler):
    """The same as `Client`, with `await`. Made inside a running loop; notices are handled on that loop."""

    def __init__(self, endpoint: str, **options: Any) -> None:
        self._loop = asyncio.get_running_loop()
        self._client = _Behind(self, endpoint, **options)
        self.log_errors = self._client.log_errors
        self.on_worker_crashed = self._client.on_worker_crashed
        self.on_no_workers = self._client.on_no_workers

    @property
    def status(self) -> bool:
        return self._client.status

    def submit(self, service: str, *body: object, **options: Any) -> "AsyncPendingCall":
        """Send a request; `await` what it gives, or keep it for later. Options are those of `Client.submit`."""
        return AsyncPendingCall(self._client.submit(service, *body, **options))

    async def call(self, service: str, *body: object, **options: Any) -> list[bytes]:
        return await self.submit(service, *body, **options)

    async def mmi(self, name: str, *body: object, **options: Any) -> list[bytes]:
        return await self.call(f"mmi.{name}", *body, **options)

    async def query(self, job_id: int | str, **options: Any) -> dict[str, Any]:
        return read_status(job_id, await self.mmi("status", str(job_id).encode(), **options))

    async def close(self) -> None:
        await asyncio.to_thread(self._client.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _hand_over(self, error: dict[str, Any]) -> None:
        try:
            self._loop.call_soon_threadsafe(self.handle_error_notification, error)
        except RuntimeError:
            pass  # The loop is closed: nobody is there to be told.


class AsyncPendingCall(Awaitable[list[bytes]]):
    """A call on its way. Who stops waiting does not take the request back."""

    def __init__(self, call: PendingCall) -> None:
        self._call = call
        self._future = asyncio.wrap_future(call.future)

    @property
    def job_id(self) -> str | None:
        return self._call.job_id

    @property
    def ledger_id(self) -> int | str | None:
        return self._call.ledger_id

    def done(self) -> bool:
        return self._call.done()

    def __await__(self) -> Generator[Any, None, list[bytes]]:
        return self._future.__await__()


class _Behind(Client):
    """Does the work of an `AsyncClient`, and hands its news on to the loop."""

    def __init__(self, front: AsyncClient, endpoint: str, **options: Any) -> None:
        self._front = front
        super().__init__(endpoint, **options)

    def handle_error_notification(self, error: dict[str, Any]) -> None:
        self._front._hand_over(error)
