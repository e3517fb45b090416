"""Add security headers and `Server-Timing` to every response, and answer HEAD."""

import time

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from unstuck import failpoints


class ServerTiming:
    """Plain ASGI, so that streams pass through it unbuffered."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun_s = time.perf_counter()
        if failpoints.active:
            failpoints.reached("http.request_received")

        async def timed(message: Message) -> None:
            if message["type"] == "http.response.start":
                took_ms = 1000 * (time.perf_counter() - begun_s)
                MutableHeaders(scope=message).append("Server-Timing", f"app;dur={took_ms:.2f}")
            await send(message)

        await self._app(scope, receive, timed)


class _Enough(Exception):
    """Ends the handler of a stream: its first lines are all that was asked for."""


class HeadRequests:
    """Plain ASGI, behind the guard."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        ended = False

        async def send_head(message: Message) -> None:
            nonlocal ended
            if message["type"] != "http.response.body":
                await send(message)
                return
            if not ended:
                ended = True
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            if message.get("more_body"):
                raise _Enough

        try:
            await self._app({**scope, "method": "GET"}, receive, send_head)
        except _Enough:
            pass
        except BaseExceptionGroup as group:
            # Streams are sent from a group of tasks.
            if group.split(_Enough)[1] is not None:
                raise


CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
ALWAYS = (
    (b"content-security-policy", CSP.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
NOT_KEPT = (b"cache-control", b"no-store")
KEPT_CHECKED = (b"cache-control", b"no-cache")
HTTPS_ONLY = (b"strict-transport-security", b"max-age=31536000")


def with_security_headers(send: Send, *, static: bool, https: bool) -> Send:
    wanted = (*ALWAYS, KEPT_CHECKED if static else NOT_KEPT, *((HTTPS_ONLY,) if https else ()))

    async def send_dressed(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", []))
            there = {name.lower() for name, _ in headers}
            message = {**message, "headers": [*headers, *(pair for pair in wanted if pair[0] not in there)]}
        await send(message)

    return send_dressed
