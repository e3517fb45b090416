"""Render pages: the Jinja environment, filters for numbers and times, blocks, messages, error pages."""

import base64
import json
import re
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse as HTMLResponse_
from starlette.responses import Response
from starlette.types import Scope as Scope_

from unstuck.domain.api_tokens import Scope
from unstuck.domain.bounded_json import decode_json
from unstuck.domain.bounds import Bounds
from unstuck.domain.units import brief, brief_size
from unstuck.errors import UnstuckError
from unstuck.http.problems import Problem
from unstuck.version import VERSION

MAX_JSON_CHARS = 20_000

_TICKS = re.compile(r"`([^`\n]{1,300})`")


def ago(at: float | None, now_s: float | None = None) -> str:
    """Say how long ago something was, or in how long it will be."""
    if at is None:
        return "–"
    age_s = (time.time() if now_s is None else now_s) - at
    if age_s < -1:
        return f"in {coarse(-age_s)}"
    return "just now" if age_s < 1 else f"{coarse(age_s)} ago"


def coarse(value_s: float | None) -> str:
    """Write an age without digits that nobody reads: 12s, 5m, 3h20m."""
    if value_s is None:
        return "–"
    if value_s < 1:
        return "0s"
    if value_s < 60:
        return f"{value_s:.0f}s"
    return brief(float(round(value_s))) if value_s < 600 else brief(round(value_s / 60) * 60.0)


def took(from_at: float | None, to_at: float | None) -> str:
    if from_at is None or to_at is None:
        return "–"
    return brief(max(0.0, to_at - from_at))


def clock(at: float | None) -> str:
    """Write a time of day with its date, in UTC: the page of a server is read from anywhere."""
    return "–" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def iso(at: float | None) -> str:
    return "" if at is None else datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def count(value: int, noun: str) -> str:
    return f"{value:,} {noun}{'' if value == 1 else 's'}"


def pretty_json(value: Any) -> str:
    """Write a value as indented JSON, cut where it is longer than anybody reads."""
    text = json.dumps(value, ensure_ascii=False, indent=2, default=str)
    if len(text) <= MAX_JSON_CHARS:
        return text
    return f"{text[:MAX_JSON_CHARS]}\n… ({len(text):,} characters in all)"


def capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def ticks(sentence: str) -> Markup:
    """Escape a sentence, and set what stands `between ticks` as code."""
    return Markup(_TICKS.sub(r"<code>\1</code>", str(escape(sentence))))


COOKIE = "unstuck_flash"
MAX_CHARS = 1_000
MAX_AGE_S = 60
BOUNDS = Bounds(32 * 1024)

Level = Literal["good", "warning", "problem"]


class Flash(msgspec.Struct, frozen=True):
    level: Level
    text: str


def write(response: Response, request: Request, level: Level, text: str) -> None:
    text = text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}…"
    value = base64.urlsafe_b64encode(msgspec.json.encode([Flash(level, text)])).decode()
    response.set_cookie(COOKIE, value, max_age=MAX_AGE_S, path=_path(request), httponly=True, samesite="strict")


def read(request: Request) -> list[Flash]:
    """Give what was written; what is no flash of ours is nothing."""
    try:
        data = base64.urlsafe_b64decode(request.cookies.get(COOKIE, ""))
        return decode_json(data, BOUNDS, type=list[Flash])[:3] if data else []
    except ValueError:
        return []


def clear(response: Response, request: Request) -> None:
    response.delete_cookie(COOKIE, path=_path(request), httponly=True, samesite="strict")


def _path(request: Request) -> str:
    return str(request.scope.get("root_path", "")) or "/"


_templates = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_templates.filters |= {
    "ago": ago,
    "brief": brief,
    "capital": capital,
    "clock": clock,
    "coarse": coarse,
    "iso": iso,
    "number": number,
    "pretty_json": pretty_json,
    "size": brief_size,
    "ticks": ticks,
}
_templates.globals |= {"count": count, "took": took, "version": VERSION}


def render(request: Request, template: str, *, status: int = 200, **values: Any) -> HTMLResponse:
    """Render a whole screen; what was to be said since the last one is said now."""
    said = read(request)
    query = f"?{request.url.query}" if request.url.query else ""
    seen = {
        **viewpoint(root_of(request), Scope.OPERATE in request.state.caller.scopes),
        "caller": request.state.caller,
        # Without the root, which is put before it again.
        "here": f"{request.scope['path'].removeprefix(root_of(request))}{query}",
        "flashes": said,
        "room": "",
        "key": "",
    }
    response = HTMLResponse(render_fragment(template, seen | values), status)
    # A page of the past must not come back with verbs that are no longer true.
    response.headers["Cache-Control"] = "no-store"
    if said:
        clear(response, request)
    return response


def render_fragment(template: str, values: dict[str, Any]) -> str:
    return _templates.get_template(template).render(values)


def viewpoint(root: str, may_operate: bool) -> dict[str, Any]:
    """Give what a fragment depends on beside the facts: everybody with the same viewpoint sees the same."""
    return {"root": root, "may": may_operate, "now": time.time()}


def root_of(request: Request) -> str:
    """Give where this door is mounted: below another app it must still find its own links."""
    return str(request.scope.get("root_path", ""))


Handler = Callable[[Request, Any], Response | Awaitable[Response]]

NO_COUNTS = {"workers": 0, "workers_troubled": False, "quarantined": 0, "problems": 0}


def show_errors(web_app: FastAPI) -> None:
    """Show errors of the page as screens; what answers programs stays as it is."""
    for kind in (Problem, UnstuckError, RequestValidationError, HTTPException):
        plain: Handler = web_app.exception_handlers[kind]
        web_app.exception_handlers[kind] = _for_people(plain)


def _for_people(plain: Handler) -> Handler:
    async def answer(request: Request, error: Exception) -> Response:
        made = await run_in_threadpool(plain, request, error)
        assert isinstance(made, Response)
        return await run_in_threadpool(_screen, request, made) if _is_person(request) else made

    return answer


def refused(scope: Scope_, made: Response) -> Response:
    """Give what somebody gets who was not let in, or for whom nothing could be done: people a screen, programs the
    problem as it is. Nothing is known of them, so it shows no rooms and holds nothing that is for them alone."""
    if not _is_person(Request(scope)):
        return made
    problem = msgspec.json.decode(bytes(made.body))
    root = root_of(Request(scope))
    shown = {name: problem[name] for name in ("title", "detail", "cure")}
    # What was sent is not sent again by a link: after a form one looks at the beginning.
    again = _address(scope) if scope["method"] == "GET" else f"{root}/"
    page = HTMLResponse_(render_fragment("refused.html", {"root": root, "again": again, **shown}), made.status_code)
    page.headers.update(
        {name: value for name, value in made.headers.items() if name.lower() not in ("content-type", "content-length")}
    )
    return page


def _address(scope: Scope_) -> str:
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
    page = render(
        request,
        "error.html",
        status=made.status_code,
        counts=NO_COUNTS,
        title=problem["title"],
        detail=problem["detail"],
        cure=problem.get("cure", ""),
        here="/",
    )
    page.headers.update(headers)
    return page
