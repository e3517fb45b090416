"""Render templates; everything that comes from jobs is escaped."""

from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined

_templates = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def render(request: Request, template: str, **values: Any) -> HTMLResponse:
    # A door that is mounted below another app must still find its own links.
    root = request.scope.get("root_path", "")
    seen = {"root": root, "caller": request.state.caller, "csrf": request.state.csrf}
    return HTMLResponse(_templates.get_template(template).render(seen | values))
