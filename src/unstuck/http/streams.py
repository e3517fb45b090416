"""Server-sent events, and how a mounted app notices the start and end of its server.

The start is its first request. The end of a lifespan comes when all connections are closed, and a page that is open
keeps its connection. Uvicorn keeps what it was asked for in the object that handles its signals, where it can be seen.
"""

import asyncio
import signal
import time
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from unstuck.http.auth.tokens import TokenCache

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


LOOK_EVERY_S = 1.0


class TokenEnded(Exception):
    """Ends the handler of a stream whose token was revoked or has expired."""


class TokenWatch:
    def __init__(
        self, send: Send, tokens: TokenCache, token_id: str | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._send = send
        self._tokens = tokens
        self._token_id = token_id
        self._clock = clock
        self._looked_at_s = clock()
        self.started = False
        self.ended_by_us = False

    async def send(self, message: Message) -> None:
        self.started = True
        if message.get("more_body") and await self._token_is_over():
            self.ended_by_us = True
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
            raise TokenEnded
        await self._send(message)

    async def _token_is_over(self) -> bool:
        if self._token_id is None or self._clock() - self._looked_at_s < LOOK_EVERY_S:
            return False
        self._looked_at_s = self._clock()
        return await self._tokens.by_id(self._token_id) is None
