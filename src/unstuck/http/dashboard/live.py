"""Send changed parts of a page to everyone who has it open: one look at the ledger per second for all.

A viewer's mailbox holds the newest text of each fragment and nothing else, so it is bounded by the screen itself:
whoever reads slowly gets fewer, newer states, and slows nobody.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import StreamingResponse

from unstuck.domain.api_tokens import Caller, Scope
from unstuck.errors import LedgerError, UnstuckError
from unstuck.http.auth.callers import Requires
from unstuck.http.dashboard.pages import EVERYWHERE, MAX_KEY_CHARS, Page, View
from unstuck.http.dashboard.rendering import render_fragment, root_of, viewpoint
from unstuck.http.problems import Problem
from unstuck.logs import logger

EVERY_S = 1.0
REST = 3.0
"""A look that takes long is followed by a rest of so many times its length."""
MAX_VIEWERS = 500
MAX_VIEWERS_EACH = MAX_VIEWERS // 2
"""Of one token: the others still find room."""
HUNG_S = 5.0
"""Who got no answer for so long from the ledger says that it sees nothing."""

log = logger("unstuck.http")


@dataclass(frozen=True)
class Subscription:
    """What is rendered once for all who share it."""

    screen: str
    key: str
    root: str
    may_operate: bool


@dataclass(eq=False)
class Viewer:
    topic: Subscription
    token_id: str | None = None
    waiting: dict[str, str] = field(default_factory=dict)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(self, fragments: dict[str, str]) -> None:
        if fragments:
            self.waiting |= fragments
            self.news.set()

    def take(self) -> dict[str, str]:
        taken, self.waiting = self.waiting, {}
        self.news.clear()
        return taken


class LiveHub:
    """Lives on the event loop; looks are made in threads."""

    def __init__(self, viewing: View, screens: dict[str, Page]) -> None:
        self._viewing = viewing
        self._screens = screens
        self._viewers: set[Viewer] = set()
        self._told: dict[Subscription, dict[str, str]] = {}
        self._task: asyncio.Task[None] | None = None
        self._seen_at = time.time()
        self._looking_s: float | None = None
        self._failed = False
        self.closed = False
        self.looks = 0
        """How often it looked, for tests: it does not depend on how many look."""

    @property
    def stale_since(self) -> float | None:
        """When it saw the ledger for the last time, where it does not see it now: what is shown is of then."""
        hung = self._looking_s is not None and time.monotonic() - self._looking_s > HUNG_S
        return self._seen_at if self._failed or hung else None

    def knows(self, page: str) -> bool:
        return page in self._screens

    def is_full(self, token_id: str | None) -> bool:
        """Return whether there is no room for one more viewer with this token."""
        own = sum(viewer.token_id == token_id for viewer in self._viewers) if token_id is not None else 0
        return len(self._viewers) >= MAX_VIEWERS or own >= MAX_VIEWERS_EACH

    def join(self, topic: Subscription, token_id: str | None = None) -> Viewer:
        viewer = Viewer(topic, token_id)
        viewer.tell(self._told.get(topic, {}))
        self._viewers.add(viewer)
        if self._task is None or self._task.done():
            # The screen that they came with was made a moment ago.
            self._failed, self._seen_at = False, time.time()
            self._task = asyncio.get_running_loop().create_task(self._go_round())
        return viewer

    def close(self) -> None:
        """Send everybody home: the server is about to end, and their streams would not by themselves."""
        self.closed = True
        self._wake_all()

    def leave(self, viewer: Viewer) -> None:
        self._viewers.discard(viewer)

    async def _go_round(self) -> None:
        while self._viewers and not self.closed:
            began_s = time.monotonic()
            topics = {viewer.topic for viewer in self._viewers}
            self._told = {topic: told for topic, told in self._told.items() if topic in topics}
            self._looking_s = began_s
            try:
                rendered = await asyncio.to_thread(self._look, topics)
            except Exception as error:  # noqa: BLE001 - whatever it was: those who look must not take the past for now
                self._fail(error)
            else:
                self._see()
                self._tell(rendered)
            self._looking_s = None
            took_s = time.monotonic() - began_s
            await asyncio.sleep(max(EVERY_S - took_s, REST * took_s if took_s > EVERY_S / 4 else 0.0, 0.05))
        self._told = {}

    def _fail(self, error: Exception) -> None:
        if not self._failed:
            if isinstance(error, UnstuckError):
                log.warning("The page cannot look at the ledger; trying again", error=str(error))
            else:
                log.error("The page cannot be shown; trying again", exc_info=error)
        self._failed = True
        self._wake_all()

    def _see(self) -> None:
        if self._failed:
            log.info("The page sees the ledger again")
            self._wake_all()
        self._failed, self._seen_at = False, time.time()

    def _wake_all(self) -> None:
        for viewer in self._viewers:
            viewer.news.set()

    def _look(self, topics: set[Subscription]) -> dict[Subscription, dict[str, str]]:
        self.looks += 1
        self._viewing.snapshots.examine()
        values: dict[tuple[str, str], dict[str, Any]] = {}
        rendered = {}
        for topic in topics:
            page = self._screens[topic.screen]
            try:
                if (topic.screen, topic.key) not in values:
                    values[topic.screen, topic.key] = page.values(self._viewing, topic.key)
            except LedgerError:
                raise
            except UnstuckError:
                # Gone while somebody looked at it: what they see last stays, and says when it was.
                continue
            context = {
                **viewpoint(topic.root, topic.may_operate),
                "room": topic.screen,
                **values[topic.screen, topic.key],
            }
            fragments = {**EVERYWHERE, **page.fragments}
            rendered[topic] = {name: render_fragment(template, context) for name, template in fragments.items()}
        return rendered

    def _tell(self, rendered: dict[Subscription, dict[str, str]]) -> None:
        for topic, fragments in rendered.items():
            before = self._told.get(topic, {})
            changed = {name: text for name, text in fragments.items() if before.get(name) != text}
            self._told[topic] = fragments
            for viewer in self._viewers:
                if viewer.topic == topic:
                    # Whoever came while we looked has been told nothing yet.
                    viewer.tell(changed if before else fragments)


TICK_S = 2.0
"""At least so often something is sent: a reader that hears nothing for longer has lost us."""

router = APIRouter()


@router.get("/live")
async def live(
    request: Request,
    caller: Annotated[Caller, Depends(Requires(Scope.READ))],
    room: Annotated[str, Query(max_length=MAX_KEY_CHARS)],
    key: Annotated[str, Query(max_length=MAX_KEY_CHARS)] = "",
) -> StreamingResponse:
    hub: LiveHub = request.app.state.hub
    if not hub.knows(room):
        raise Problem(404, "not_found", f"There is no live screen {room!r}.")
    if hub.is_full(caller.token_id):
        raise Problem(503, "too_many_viewers", "Too many look at once.", headers={"Retry-After": "10"})
    topic = Subscription(room, key, root_of(request), Scope.OPERATE in caller.scopes)
    return StreamingResponse(
        _stream(hub, topic, caller.token_id),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


async def _stream(hub: LiveHub, topic: Subscription, token_id: str | None) -> AsyncIterator[bytes]:
    viewer = hub.join(topic, token_id)
    try:
        yield b"retry: 1000\n\n"
        while not hub.closed:
            yield await _next(hub, viewer)
    finally:
        hub.leave(viewer)


async def _next(hub: LiveHub, viewer: Viewer) -> bytes:
    try:
        async with asyncio.timeout(TICK_S):
            await viewer.news.wait()
    except TimeoutError:
        pass
    said = {"now": time.time(), "blind_since": hub.stale_since, "fragments": viewer.take()}
    return b"data: " + msgspec.json.encode(said) + b"\n\n"
