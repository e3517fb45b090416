"""Look at every request before anybody else does, and say who the caller is."""

from starlette.types import ASGIApp, Receive, Scope, Send

from unstuck.http.callers import LOCAL
from unstuck.http.desk import Desk


class Doorman:
    """Plain ASGI, so that streams pass through it unbuffered."""

    def __init__(self, app: ASGIApp, desk: Desk) -> None:
        self._app = app
        self._desk = desk

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope.setdefault("state", {}).update(caller=LOCAL, csrf="")
        await self._app(scope, receive, send)
