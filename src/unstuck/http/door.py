"""Put the web door together: guard, API, page. The routes are in `api/` and `page/`, who may come in is in `guard/`."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import FastAPI

from unstuck import config
from unstuck.app import App
from unstuck.client.counter import Counter
from unstuck.config import Settings, Web
from unstuck.http import api, page
from unstuck.http.carrier import Carried
from unstuck.http.desk import Desk
from unstuck.http.foreign.crew import Crew
from unstuck.http.foreign.quick import QuickRoutes
from unstuck.http.guard import stand_guard
from unstuck.http.guard.place import Place, mounted
from unstuck.http.guard.shared import Member
from unstuck.http.heads import Heads
from unstuck.http.openapi import describe
from unstuck.http.problems import explain_errors
from unstuck.http.timing import Timing
from unstuck.notify.alerts.sender import AlertSender
from unstuck.reaper.background import BackgroundReaper, own_connections
from unstuck.store.opening import open_ledger
from unstuck.version import VERSION

BY = "web"
"""The name of this reaper in verdicts."""


def open_door(app: App | str | None = None, *, open: bool = False, **web: Any) -> FastAPI:
    """Return the ASGI app of the HTTP API. Nothing is connected before its start or, if it is mounted, its first
    request: an app that is mounted into another is not told of the start."""
    settings = app.settings if isinstance(app, App) else config.load({"url": app})
    settings_of_door = replace(settings.web, **web)
    door = door_of(settings, settings_of_door, mounted(settings_of_door, open=open))
    door.add_middleware(Carried, begin=partial(keep_watch, door), farewell=partial(say_goodbye, door))
    return door


def door_of(settings: Settings, web: Web, place: Place, member: Member | None = None) -> FastAPI:
    """Return the door of one process; of several that share a socket only the first watches and sends alerts."""
    member = member or Member()
    web = replace(web, reap=web.reap and member.leads)
    door = FastAPI(
        title="Unstuck",
        version=VERSION,
        description="Durable background jobs: enqueue, work in any language, watch and operate.",
        openapi_url="/api/v1/openapi.json",
        docs_url=None,
        redoc_url=None,
        lifespan=_lifespan,
        # The page and its answers are ours; FastAPI's own slash redirects would leave the guard's path rules.
        redirect_slashes=False,
    )
    door.state.desk = Desk(Counter(settings), web)
    door.state.crew = Crew(door.state.desk)
    door.state.reaper = _reaper_of(settings, door.state.crew) if web.reap else None
    door.state.leaving = False
    door.state.member = member
    explain_errors(door)
    api.add_to(door)
    page.add_to(door)
    door.add_middleware(Heads)
    door.add_middleware(QuickRoutes, crew=door.state.crew)
    stand_guard(door, place, (*api.ROUTERS, *page.ROUTERS), member)
    describe(door)
    # Outside of the guard: what that takes counts too.
    door.add_middleware(Timing)
    return door


def _reaper_of(settings: Settings, crew: Crew) -> BackgroundReaper:
    return BackgroundReaper(partial(own_connections, settings), settings.recovery, by=BY, tallies=crew.tallies)


def keep_watch(door: FastAPI) -> None:
    """Begin to look for dead workers, unless `web.reap` is off; never blocks."""
    reaper: BackgroundReaper | None = door.state.reaper
    if reaper is not None:
        reaper.start()


def _end_watch(reaper: BackgroundReaper) -> None:
    reaper.stop()
    reaper.join()


@asynccontextmanager
async def _lifespan(door: FastAPI) -> AsyncIterator[None]:
    desk: Desk = door.state.desk
    crew: Crew = door.state.crew
    async with AsyncExitStack() as stack:
        stack.callback(desk.counter.close)
        stack.push_async_callback(asyncio.to_thread, crew.close)
        if door.state.reaper is not None:
            stack.push_async_callback(asyncio.to_thread, _end_watch, door.state.reaper)
        keep_watch(door)
        if desk.settings.alerts.targets and door.state.member.leads:
            # A ledger of its own: its looks must not stand in the way of the handlers'.
            ledger = open_ledger(desk.settings)
            stack.callback(ledger.close)
            sender = AlertSender(ledger, desk.settings)
            sender.start()
            stack.push_async_callback(asyncio.to_thread, sender.stop)
        yield


def say_goodbye(door: FastAPI) -> None:
    """Let go of everybody who would stay for ever: they find the next server by themselves."""
    desk: Desk = door.state.desk
    crew: Crew = door.state.crew
    door.state.leaving = True
    if door.state.reaper is not None:
        door.state.reaper.stop()
    crew.hush()
    door.state.hub.close()
    desk.counter.wake_listeners()
