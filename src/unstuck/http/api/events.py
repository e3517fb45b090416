"""The event stream: server-sent events that can be resumed, each reader at its own pace."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.responses import Response, StreamingResponse

from unstuck.domain.api_tokens import Caller, Scope
from unstuck.domain.event_cursor import MAX_CHARS, Cursor, read_cursor
from unstuck.domain.events import Event, EventKind, checked_kinds
from unstuck.domain.units import seconds
from unstuck.http.auth.callers import Requires
from unstuck.http.services import Services, ServicesDep
from unstuck.notify.feed import Wake
from unstuck.notify.subscriptions import EventFilter, EventSource, FeedSubscription, JobSubscription

router = APIRouter(tags=["events"])

KEEP_ALIVE_S = 10.0
"""So often a line goes out even where nothing happens: proxies cut what is silent, and we see who is gone."""
RETRY_MS = 1_000
MAX_GATHER_S = 10.0
PIECE = 200
"""So many events go out in one piece."""

_EXAMPLE = (
    'id: 120.7141.1767225600000\nevent: worker_dead\ndata: {"kind":"worker_dead","at":1767225600.0,'
    '"message":"Dead worker detected: …","id":120,"worker_id":"k98cfw3jy0e9","cursor":"120.7141.1767225600000"}\n\n'
)
_STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "A stream that does not end (with `job`: ends with the job). Kinds: "
        + ", ".join(EventKind)
        + ".",
        "content": {"text/event-stream": {"schema": {"type": "string"}, "example": _EXAMPLE}},
    },
    204: {"description": "With `job`, resumed: the job has ended and its end was told. A browser stops coming back."},
}


@router.get(
    "/api/v1/events", summary="What happens, as it happens", responses=_STREAM, response_class=StreamingResponse
)
async def events(
    request: Request,
    services: ServicesDep,
    caller: Annotated[Caller, Depends(Requires(Scope.READ))],
    kind: Annotated[list[str] | None, Query(description="Only these kinds.", max_length=50)] = None,
    job: Annotated[int | None, Query(description="The life of one job, from its beginning.", ge=1, lt=2**63)] = None,
    worker: Annotated[str | None, Query(description="Only of this worker (its id).", max_length=200)] = None,
    after: Annotated[
        str | None, Query(description="Go on behind this event: the `cursor` of the last.", max_length=MAX_CHARS)
    ] = None,
    last_event_id: Annotated[str | None, Header(description="Wins over `after`.", max_length=MAX_CHARS)] = None,
    gather: Annotated[
        str, Query(description="A burst of one kind is one event, told when nothing came for so long.", max_length=20)
    ] = "500ms",
) -> Response:
    """Events of the whole ledger, or the life of one job. Resume with `Last-Event-ID`; a `gap` event says that some
    were passed over. No reader slows another."""
    place = last_event_id or after
    cursor = None if not place else read_cursor(place)
    kinds = checked_kinds(part.strip() for text in kind or () for part in text.split(",") if part.strip())
    gather_s = min(seconds(gather, "gather"), MAX_GATHER_S)
    loop = asyncio.get_running_loop()
    woken = asyncio.Event()

    def wake() -> None:
        loop.call_soon_threadsafe(woken.set)

    reading = await asyncio.to_thread(_open, services, wake, kinds, job, worker, cursor, gather_s)
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    if isinstance(reading, JobSubscription) and await asyncio.to_thread(reading.is_told):
        # A browser that is cut off comes back for ever, also to a job that has ended; this alone ends it.
        return Response(status_code=204)
    told = _lines(reading, woken, lambda: request.app.state.leaving)
    return StreamingResponse(told, media_type="text/event-stream", headers=headers)


def _open(
    services: Services,
    wake: Wake,
    kinds: frozenset[str],
    job: int | None,
    worker: str | None,
    cursor: Cursor | None,
    gather_s: float,
) -> EventSource:
    if job is not None:
        services.runtime.services().operator.jobs.get(
            job
        )  # So that a job that does not exist is a 404, and no endless silence.
        return JobSubscription(lambda: services.ledger, job, kinds, cursor)
    choice = EventFilter(kinds, worker)
    return FeedSubscription(services.runtime.services().feed, lambda: services.ledger, wake, choice, cursor, gather_s)


async def _lines(reading: EventSource, woken: asyncio.Event, is_leaving: Callable[[], bool]) -> AsyncIterator[str]:
    try:
        # The place is sent first, so that somebody who is cut off before the first event still misses nothing.
        yield f"retry: {RETRY_MS}\nid: {reading.cursor}\n\n"
        silent_s = 0.0
        while True:
            woken.clear()
            events = await asyncio.to_thread(reading.take)
            for start in range(0, len(events), PIECE):
                # Many at once: of a burst each reader would else take a turn of the loop for every single event.
                yield "".join(map(line_of, events[start : start + PIECE]))
            if reading.is_finished:
                # Whoever comes back with this place has heard it all.
                yield f"id: {reading.cursor}\n\n"
            if reading.is_finished or is_leaving():
                return
            silent_s = 0.0 if events else silent_s
            if silent_s >= KEEP_ALIVE_S:
                silent_s = 0.0
                # With the place: who chose what seldom happens would come back from far behind.
                yield f": still here\nid: {reading.cursor}\n\n"
            wait_s = min(reading.max_wait_s, KEEP_ALIVE_S)
            silent_s += wait_s
            try:
                await asyncio.wait_for(woken.wait(), wait_s)
            except TimeoutError:
                pass  # Time to look all the same.
    finally:
        reading.close()


def line_of(event: Event) -> str:
    """Write one event for the wire. JSON has no line breaks, and kinds are words: nothing can break out of its line."""
    place = f"id: {event.cursor}\n" if event.cursor else ""
    kind = "".join(letter for letter in event.kind if letter.isalnum() or letter in "_-")
    return f"{place}event: {kind}\ndata: {msgspec.json.encode(event).decode()}\n\n"
