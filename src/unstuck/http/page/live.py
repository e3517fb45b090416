"""Send what changes on a screen to whoever looks at it, as server-sent events."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import StreamingResponse

from unstuck.http.callers import Caller, Scope, needs
from unstuck.http.page.hub import Hub, Topic, Viewer
from unstuck.http.page.screens import MAX_KEY_CHARS
from unstuck.http.page.templating import root_of
from unstuck.http.problems import Problem

TICK_S = 2.0
"""At least so often something is sent: a reader that hears nothing for longer has lost us."""

router = APIRouter()


@router.get("/live")
async def live(
    request: Request,
    caller: Annotated[Caller, Depends(needs(Scope.READ))],
    room: Annotated[str, Query(max_length=MAX_KEY_CHARS)],
    key: Annotated[str, Query(max_length=MAX_KEY_CHARS)] = "",
) -> StreamingResponse:
    hub: Hub = request.app.state.hub
    if not hub.knows(room):
        raise Problem(404, "not_found", f"There is no live screen {room!r}.")
    if hub.full:
        raise Problem(503, "too_many_viewers", "Too many look at once.", headers={"Retry-After": "10"})
    topic = Topic(room, key, root_of(request), Scope.OPERATE in caller.scopes)
    return StreamingResponse(
        _stream(hub, topic),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


async def _stream(hub: Hub, topic: Topic) -> AsyncIterator[bytes]:
    viewer = hub.join(topic)
    try:
        yield b"retry: 1000\n\n"
        while not hub.closed:
            yield await _next(hub, viewer)
    finally:
        hub.leave(viewer)


async def _next(hub: Hub, viewer: Viewer) -> bytes:
    try:
        async with asyncio.timeout(TICK_S):
            await viewer.news.wait()
    except TimeoutError:
        pass
    said = {"now": time.time(), "blind_since": hub.blind_since, "fragments": viewer.take()}
    return b"data: " + msgspec.json.encode(said) + b"\n\n"
