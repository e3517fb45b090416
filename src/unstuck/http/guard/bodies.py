"""Read a body before anybody else sees it: not too much, not too slowly, not too deep, and of a kind we take."""

import asyncio
from collections.abc import Mapping
from urllib.parse import parse_qs

from starlette.types import Message, Receive

from unstuck.http.guard.depth import is_deeper_than
from unstuck.http.problems import Problem

MAX_JSON_DEPTH = 64
IDLE_S = 10.0
WHOLE_S = 60.0
MAX_FORM_FIELDS = 2_000
LARGE_BYTES = 256 * 1024
JSON = "application/json"
FORM = "application/x-www-form-urlencoded"


def has_body(headers: Mapping[str, str]) -> bool:
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


async def read_body(receive: Receive, headers: Mapping[str, str], limit_bytes: int) -> bytes:
    """Read the whole body within the limits of size and time."""
    declared = headers.get("content-length")
    if declared is not None and (not declared.isdigit() or int(declared[:20]) > limit_bytes):
        raise too_large(limit_bytes)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(WHOLE_S):
            while True:
                async with asyncio.timeout(IDLE_S):
                    message = await receive()
                if message["type"] != "http.request":
                    raise Problem(400, "incomplete", "The body ended too soon.")
                part = message.get("body", b"")
                size += len(part)
                if size > limit_bytes:
                    raise too_large(limit_bytes)
                parts.append(part)
                if not message.get("more_body"):
                    return b"".join(parts)
    except TimeoutError:
        raise Problem(408, "too_slow", "The body did not arrive in time.", cure="Send it again.") from None


def replayed(body: bytes, receive: Receive) -> Receive:
    """Hand a body that was read to whoever comes next; afterwards they hear what the caller does."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


async def check_json(headers: Mapping[str, str], body: bytes) -> None:
    """Refuse what is no JSON by its type: a form of a strange website cannot have this one."""
    kind = media_type(headers)
    if kind != JSON and not (kind.startswith("application/") and kind.endswith("+json")):
        raise Problem(
            415,
            "not_json",
            f"A body here is JSON, not {kind[:100] or 'nothing in particular'}.",
            cure=f"Send the header `Content-Type: {JSON}`.",
        )
    if len(body) > LARGE_BYTES:
        # Beside the loop that serves the others.
        deep = await asyncio.to_thread(is_deeper_than, MAX_JSON_DEPTH, body)
    else:
        deep = is_deeper_than(MAX_JSON_DEPTH, body)
    if deep:
        raise Problem(
            422,
            "too_deep",
            f"This is not JSON, or it is nested more than {MAX_JSON_DEPTH} deep.",
            cure="Send flatter data, or put it into a string.",
        )


def form_field(headers: Mapping[str, str], body: bytes, name: str) -> str:
    """Give one field of a posted form; empty where there is none."""
    if media_type(headers) != FORM:
        return ""
    try:
        fields = parse_qs(body.decode(), keep_blank_values=True, max_num_fields=MAX_FORM_FIELDS)
    except ValueError:
        raise Problem(422, "not_valid", "This form cannot be read.") from None
    return fields.get(name, [""])[0]


def media_type(headers: Mapping[str, str]) -> str:
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def too_large(limit_bytes: int) -> Problem:
    return Problem(
        413,
        "too_large",
        f"The body is larger than {limit_bytes} bytes.",
        cure="Send less at once; `web.max_body_bytes` is the limit.",
    )
