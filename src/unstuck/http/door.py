"""Put the web door together: guard, API, page. The routes are in `api/` and `page/`, who may come in is in `guard/`."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio.to_thread
from fastapi import FastAPI

from unstuck import config
from unstuck.app import App
from unstuck.client.counter import Counter
from unstuck.config import Settings, Web
from unstuck.http import api, page
from unstuck.http.desk import Desk
from unstuck.http.foreign.crew import Crew
from unstuck.http.guard import stand_guard
from unstuck.http.problems import explain_errors
from unstuck.http.timing import Timing
from unstuck.version import VERSION


def open_door(app: App | str | None = None, **web: Any) -> FastAPI:
    """Give the ASGI app of a web door; nothing is connected before its first use."""
    settings = app.settings if isinstance(app, App) else config.load({"url": app})
    return door_of(settings, replace(settings.web, **web))


def door_of(settings: Settings, web: Web) -> FastAPI:
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
    explain_errors(door)
    api.add_to(door)
    page.add_to(door)
    stand_guard(door)
    # Outside of the guard: what that takes counts too.
    door.add_middleware(Timing)
    return door


@asynccontextmanager
async def _lifespan(door: FastAPI) -> AsyncIterator[None]:
    desk: Desk = door.state.desk
    crew: Crew = door.state.crew
    try:
        yield
    finally:
        await anyio.to_thread.run_sync(crew.close)
        desk.counter.close()
