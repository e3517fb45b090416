"""Render templates; everything that comes from jobs is escaped."""

import time
from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from unstuck.domain.durations import brief
from unstuck.domain.sizes import brief_size
from unstuck.http.callers import Scope
from unstuck.http.page import flash, words
from unstuck.store.manners import politely
from unstuck.version import VERSION

_templates = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_templates.filters |= {
    "ago": words.ago,
    "brief": brief,
    "capital": words.capital,
    "clock": words.clock,
    "coarse": words.coarse,
    "iso": words.iso,
    "number": words.number,
    "pretty_json": words.pretty_json,
    "size": brief_size,
    "ticks": words.ticks,
}
_templates.globals |= {"count": words.count, "took": words.took, "version": VERSION}


def render(request: Request, template: str, *, status: int = 200, **values: Any) -> HTMLResponse:
    """Render a whole screen; what was to be said since the last one is said now."""
    said = flash.read(request)
    query = f"?{request.url.query}" if request.url.query else ""
    seen = {
        **viewpoint(root_of(request), Scope.OPERATE in request.state.caller.scopes),
        "caller": request.state.caller,
        "csrf": request.state.csrf,
        # Without the root, which is put before it again.
        "here": f"{request.scope['path'].removeprefix(root_of(request))}{query}",
        "flashes": said,
        "room": "",
        "key": "",
    }
    response = HTMLResponse(_written(template, seen | values), status)
    # A page of the past must not come back with verbs that are no longer true.
    response.headers["Cache-Control"] = "no-store"
    if said:
        flash.clear(response, request)
    return response


def render_fragment(template: str, values: dict[str, Any]) -> str:
    return _written(template, values)


def _written(template: str, values: dict[str, Any]) -> str:
    return "".join(politely(_templates.get_template(template).generate(values)))


def viewpoint(root: str, may_operate: bool) -> dict[str, Any]:
    """Give what a fragment depends on beside the facts: everybody with the same viewpoint sees the same."""
    return {"root": root, "may": may_operate, "now": time.time()}


def root_of(request: Request) -> str:
    """Give where this door is mounted: below another app it must still find its own links."""
    return str(request.scope.get("root_path", ""))
