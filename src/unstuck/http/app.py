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


def create_app(app: App | str | None = None, *, open: bool = False, **http: Any) -> FastAPI:
    """Return the ASGI app of the HTTP API. Nothing is connected before its start or, if it is mounted, its first
    request: an app that is mounted into another is not told of the start."""
    settings = app.settings if isinstance(app, App) else config.load({"url": app})
    http_settings = replace(settings.http, **http)
    web_app = build_app(settings, http_settings, mounted(http_settings, open=open))
    web_app.add_middleware(Carried, begin=partial(keep_watch, web_app), farewell=partial(say_goodbye, web_app))
    return web_app


def build_app(settings: Settings, http: HttpSettings, exposure: Exposure, member: Member | None = None) -> FastAPI:
    """Return the door of one process; of several that share a socket only the first watches and sends alerts."""
    member = member or Member()
    http = replace(http, reap=http.reap and member.leads)
    web_app = FastAPI(
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
    web_app.state.services = Services(ClientRuntime(settings), http)
    web_app.state.worker_service = WorkerService(web_app.state.services)
    web_app.state.reaper = _reaper_of(settings, web_app.state.worker_service) if http.reap else None
    web_app.state.leaving = False
    web_app.state.member = member
    explain_errors(web_app)
    api.add_to(web_app)
    dashboard.add_to(web_app)
    web_app.add_middleware(HeadRequests)
    web_app.add_middleware(FastRoutes, service=web_app.state.worker_service)
    add_auth(web_app, exposure, (*api.ROUTERS, *dashboard.ROUTERS), member)
    describe(web_app)
    # Outside of the guard: what that takes counts too.
    web_app.add_middleware(ServerTiming)
    return web_app


def _reaper_of(settings: Settings, service: WorkerService) -> BackgroundReaper:
    return BackgroundReaper(partial(own_connections, settings), settings.recovery, by=BY, counters=service.counters)


def keep_watch(web_app: FastAPI) -> None:
    """Begin to look for dead workers, unless `http.reap` is off; never blocks."""
    reaper: BackgroundReaper | None = web_app.state.reaper
    if reaper is not None:
        reaper.start()


def _end_watch(reaper: BackgroundReaper) -> None:
    reaper.stop()
    reaper.join()


@asynccontextmanager
async def _lifespan(web_app: FastAPI) -> AsyncIterator[None]:
    services: Services = web_app.state.services
    service: WorkerService = web_app.state.worker_service
    async with AsyncExitStack() as stack:
        stack.callback(services.runtime.close)
        stack.push_async_callback(asyncio.to_thread, service.close)
        if web_app.state.reaper is not None:
            stack.push_async_callback(asyncio.to_thread, _end_watch, web_app.state.reaper)
        keep_watch(web_app)
        if services.settings.alerts.targets and web_app.state.member.leads:
            # A ledger of its own: its looks must not stand in the way of the handlers'.
            ledger = open_ledger(services.settings)
            stack.callback(ledger.close)
            sender = AlertSender(ledger, services.settings)
            sender.start()
            stack.push_async_callback(asyncio.to_thread, sender.stop)
        yield


def say_goodbye(web_app: FastAPI) -> None:
    """Let go of everybody who would stay for ever: they find the next server by themselves."""
    services: Services = web_app.state.services
    service: WorkerService = web_app.state.worker_service
    web_app.state.leaving = True
    if web_app.state.reaper is not None:
        web_app.state.reaper.stop()
    service.stop_waiting()
    web_app.state.hub.close()
    services.runtime.wake_listeners()


def add_auth(web_app: FastAPI, exposure: Exposure, routers: Iterable[APIRouter], member: Member) -> None:
    services: Services = web_app.state.services
    # The ledger is opened by the first who needs it, in a thread.
    web_app.state.tokens = TokenCache(lambda: services.ledger.admin.api_tokens(), services.http.token)
    web_app.state.mistakes = RateLimiter(login.MISTAKES_PER_S, login.MISTAKES_AT_ONCE, shared=member.group.mistakes)
    web_app.include_router(login.router, include_in_schema=False)
    routes = KnownRoutes([*routers, login.router])
    web_app.add_middleware(
        AuthMiddleware, services=services, tokens=web_app.state.tokens, exposure=exposure, routes=routes, member=member
    )
