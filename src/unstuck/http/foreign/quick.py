"""Answer the beat of a worker that is known without going through all that other requests need.

Thousands of workers beat, and a beat is the same each time. Whatever is not quite plain goes the usual way, which says
what is wrong with it: so nothing is decided here that is not decided there too.
"""

from typing import Annotated, Any

import msgspec
from starlette._utils import get_route_path
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as Connection

from unstuck.domain.names import checked_name
from unstuck.domain.states import LIVING
from unstuck.http.callers import Caller, Scope
from unstuck.http.foreign.crew import Crew, orders, plain
from unstuck.http.foreign.seats import Seat, checked_metadata, may_speak_for
from unstuck.http.guard.bodies import replayed
from unstuck.store import manners
from unstuck.store.records import BeatAnswer

PATHS = frozenset({"/api/workers/heartbeat", "/api/v1/workers/heartbeat"})


class _Said(msgspec.Struct):
    worker_id: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    metadata: dict[str, Any] = {}


_decoder = msgspec.json.Decoder(_Said)


class QuickBeats:
    """Plain ASGI, behind the guard: who asks is known, and the body has been read."""

    def __init__(self, app: ASGIApp, crew: Crew) -> None:
        self._app = app
        self._crew = crew

    async def __call__(self, scope: Connection, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or get_route_path(scope) not in PATHS:
            await self._app(scope, receive, send)
            return
        # All the way, and not only while it is written: beside a page that is drawn each step of it would wait.
        with manners.hurry():
            body = await _whole(receive)
            answer = await self._quickly(scope["state"]["caller"], body)
            if answer is None:
                await self._app(scope, replayed(body, receive), send)
            else:
                await Response(answer, media_type="application/json")(scope, receive, send)

    async def _quickly(self, caller: Caller, body: bytes) -> bytes | None:
        """Give the answer; None where the usual way must be taken."""
        if Scope.WORKER not in caller.scopes or not self._crew.is_open:
            return None
        try:
            said = _decoder.decode(body)
            metadata = checked_metadata(said.metadata)
            seat = self._crew.seats.known(checked_name(said.worker_id, "Worker"))
            if seat is None or not may_speak_for(seat, caller):
                return None
            answer = await self._crew.pulse(seat, metadata)
        except Exception:  # noqa: BLE001 - a beat may be written twice, and there it is said what is wrong
            return None
        return None if answer.state not in LIVING else msgspec.json.encode(recorded(seat, answer))


def recorded(seat: Seat, answer: BeatAnswer) -> dict[str, Any]:
    """Say that a worker's beat was written, and what is asked of it."""
    told = {"success": True, "message": "Heartbeat recorded", "next_heartbeat_in": plain(seat.interval_s)}
    return {**told, **orders(seat, answer), "declared_dead": None}


async def _whole(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if message["type"] != "http.request" or not message.get("more_body"):
            return b"".join(parts)
