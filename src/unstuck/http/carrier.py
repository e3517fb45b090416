"""Notice the start and the end of the server that carries a mounted door: no mounted app is told of either.

The start is its first request. The end of a lifespan comes when all connections are closed, and a page that is open
keeps its connection. Uvicorn keeps what it was asked for in the object that handles its signals, where it can be seen.
"""

import asyncio
import signal
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

LOOK_S = 0.5


class Carried:
    """Plain ASGI. Calls `begin` with the first request and `farewell` once, both from the event loop."""

    def __init__(self, app: ASGIApp, begin: Callable[[], None], farewell: Callable[[], None]) -> None:
        self._app = app
        self._begin = begin
        self._farewell = farewell
        self._watching: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # From the first request on: before it there is neither a loop to watch from nor a stream to end.
        if self._watching is None or self._watching.get_loop() is not asyncio.get_running_loop():
            self._watching = asyncio.get_running_loop().create_task(self._watch())
            self._begin()
        await self._app(scope, receive, send)

    async def _watch(self) -> None:
        while not server_is_leaving():  # noqa: ASYNC110 - a plain mark of somebody else, with no event to wait for
            await asyncio.sleep(LOOK_S)
        self._farewell()


def server_is_leaving() -> bool:
    """Say whether the server of this process was asked to end, as far as it lets others see."""
    handlers = (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))
    return any(getattr(getattr(handler, "__self__", None), "should_exit", False) is True for handler in handlers)
