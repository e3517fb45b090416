"""Carry a sentence over a redirect: what a verb did is said on the next screen, once."""

import base64
from typing import Literal

import msgspec
from fastapi import Request
from starlette.responses import Response

from unstuck.domain.bounded import Bounds
from unstuck.domain.bounded_json import decode_json

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
