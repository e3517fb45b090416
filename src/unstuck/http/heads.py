"""Answer HEAD wherever there is a GET: probes and `curl -I` ask for nothing but the first lines."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class _Enough(Exception):
    """Ends the handler of a stream: its first lines are all that was asked for."""


class Heads:
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
