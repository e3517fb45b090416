"""Tell people what went wrong on a screen; programs get the same as problem+json."""

from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import quote

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, Response
from starlette.types import Scope

from unstuck.domain.errors import UnstuckError
from unstuck.http.page.templating import render, render_fragment, root_of
from unstuck.http.problems import Problem

Handler = Callable[[Request, Any], Response | Awaitable[Response]]

NO_COUNTS = {"workers": 0, "workers_troubled": False, "quarantined": 0, "problems": 0}


def show_errors(door: FastAPI) -> None:
    """Show errors of the page as screens; what answers programs stays as it is."""
    for kind in (Problem, UnstuckError, RequestValidationError, HTTPException):
        plain: Handler = door.exception_handlers[kind]
        door.exception_handlers[kind] = _for_people(plain)


def _for_people(plain: Handler) -> Handler:
    async def answer(request: Request, error: Exception) -> Response:
        made = await run_in_threadpool(plain, request, error)
        assert isinstance(made, Response)
        return await run_in_threadpool(_screen, request, made) if _is_person(request) else made

    return answer


def refused(scope: Scope, made: Response) -> Response:
    """Give what somebody gets who was not let in, or for whom nothing could be done: people a screen, programs the
    problem as it is. Nothing is known of them, so it shows no rooms and holds nothing that is for them alone."""
    if not _is_person(Request(scope)):
        return made
    problem = msgspec.json.decode(bytes(made.body))
    root = root_of(Request(scope))
    shown = {name: problem[name] for name in ("title", "detail", "cure")}
    # What was sent is not sent again by a link: after a form one looks at the beginning.
    again = _address(scope) if scope["method"] == "GET" else f"{root}/"
    screen = HTMLResponse(render_fragment("refused.html", {"root": root, "again": again, **shown}), made.status_code)
    screen.headers.update(
        {name: value for name, value in made.headers.items() if name.lower() not in ("content-type", "content-length")}
    )
    return screen


def _address(scope: Scope) -> str:
    """Give where they asked, as a link that leads nowhere else: two slashes would be the name of a host."""
    query = scope.get("query_string", b"").decode("latin-1")
    return quote(f"/{scope['path'].lstrip('/')}") + (f"?{query}" if query else "")


def _is_person(request: Request) -> bool:
    path = request.scope["path"].removeprefix(root_of(request))
    wants = "text/html" in request.headers.get("accept", "")
    return wants and not path.startswith(("/api/", "/static/", "/metrics", "/live", "/healthz", "/readyz"))


def _screen(request: Request, made: Response) -> Response:
    problem = msgspec.json.decode(bytes(made.body))
    headers = {name: value for name, value in made.headers.items() if name.lower() == "retry-after"}
    # The ledger may be what is away: this screen asks nothing of it.
    screen = render(
        request,
        "error.html",
        status=made.status_code,
        counts=NO_COUNTS,
        title=problem["title"],
        detail=problem["detail"],
        cure=problem.get("cure", ""),
        here="/",
    )
    screen.headers.update(headers)
    return screen
