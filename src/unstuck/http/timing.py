"""Say with every answer how long the server took until it began: the header `Server-Timing`."""

import time

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Timing:
    """Plain ASGI, so that streams pass through it unbuffered."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun_s = time.perf_counter()

        async def timed(message: Message) -> None:
            if message["type"] == "http.response.start":
                took_ms = 1000 * (time.perf_counter() - begun_s)
                MutableHeaders(scope=message).append("Server-Timing", f"app;dur={took_ms:.2f}")
            await send(message)

        await self._app(scope, receive, timed)
