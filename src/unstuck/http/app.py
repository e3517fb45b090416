"""Build the ASGI app from its parts: authentication, API, dashboard."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, FastAPI

from unstuck import config
from unstuck.app import App
from unstuck.client.runtime import ClientRuntime
from unstuck.config import HttpSettings, Settings
from unstuck.http import api, dashboard
from unstuck.http.auth.limits import RateLimiter
from unstuck.http.auth.middleware import AuthMiddleware
from unstuck.http.auth.origins import Exposure, mounted
from unstuck.http.auth.route_scopes import KnownRoutes
from unstuck.http.auth.shared_counters import Member
from unstuck.http.auth.tokens import TokenCache
from unstuck.http.dashboard import login
from unstuck.http.middleware import HeadRequests, ServerTiming
from unstuck.http.openapi import describe
from unstuck.http.problems import explain_errors
from unstuck.http.services import Services
from unstuck.http.streams import Carried
from unstuck.http.workers.protocol import FastRoutes
from unstuck.http.workers.service import WorkerService
from unstuck.ledger.open import open_ledger
from unstuck.maintenance.background import BackgroundReaper, own_connections
from unstuck.notify.alerts.sender import AlertSender
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


def door_of(settings: Settings, web: HttpSettings, place: Exposure, member: Member | None = None) -> FastAPI:
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
    door.state.desk = Services(ClientRuntime(settings), web)
    door.state.crew = WorkerService(door.state.desk)
    door.state.reaper = _reaper_of(settings, door.state.crew) if web.reap else None
    door.state.leaving = False
    door.state.member = member
    explain_errors(door)
    api.add_to(door)
    dashboard.add_to(door)
    door.add_middleware(HeadRequests)
    door.add_middleware(FastRoutes, crew=door.state.crew)
    add_auth(door, place, (*api.ROUTERS, *dashboard.ROUTERS), member)
    describe(door)
    # Outside of the guard: what that takes counts too.
    door.add_middleware(ServerTiming)
    return door


def _reaper_of(settings: Settings, crew: WorkerService) -> BackgroundReaper:
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
    desk: Services = door.state.desk
    crew: WorkerService = door.state.crew
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
    desk: Services = door.state.desk
    crew: WorkerService = door.state.crew
    door.state.leaving = True
    if door.state.reaper is not None:
        door.state.reaper.stop()
    crew.stop_waiting()
    door.state.hub.close()
    desk.counter.wake_listeners()


def add_auth(door: FastAPI, place: Exposure, routers: Iterable[APIRouter], member: Member) -> None:
    desk: Services = door.state.desk
    # The ledger is opened by the first who needs it, in a thread.
    door.state.keyring = TokenCache(lambda: desk.ledger.api_tokens(), desk.web.token)
    door.state.mistakes = RateLimiter(login.MISTAKES_PER_S, login.MISTAKES_AT_ONCE, shared=member.group.mistakes)
    door.include_router(login.router, include_in_schema=False)
    routes = KnownRoutes([*routers, login.router])
    door.add_middleware(
        AuthMiddleware, desk=desk, keyring=door.state.keyring, place=place, routes=routes, member=member
    )
