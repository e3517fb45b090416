"""Read a body before anybody else sees it: not too much, not too slowly, not too deep, and of a kind we take."""

import asyncio
from collections.abc import Mapping
from urllib.parse import parse_qs

from starlette.types import Message, Receive

from unstuck.domain.bounded import BoundExceeded, Bounds
from unstuck.domain.bounded_json import check_json as measure_json
from unstuck.http.problems import Problem

IDLE_S = 10.0
WHOLE_S = 60.0
MAX_FORM_FIELDS = 2_000
MAX_FORM_BYTES = 256 * 1024
"""Of a form of the dashboard: a thousand ids of jobs, and some words."""
LARGE_BYTES = 256 * 1024
JSON = "application/json"
FORM = "application/x-www-form-urlencoded"


def has_body(headers: Mapping[str, str]) -> bool:
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


def declared_bytes(headers: Mapping[str, str], limit_bytes: int) -> int:
    """Return how large the body may be: what it says, or the limit if it does not say. Refuse one that is too large."""
    declared = headers.get("content-length")
    if declared is None:
        return limit_bytes
    if not declared.isdigit() or int(declared[:20]) > limit_bytes:
        raise too_large(limit_bytes)
    return int(declared)


async def read_body(receive: Receive, headers: Mapping[str, str], limit_bytes: int) -> bytes:
    """Read the whole body within the limits of size and time."""
    declared_bytes(headers, limit_bytes)
    parts: list[bytes] = []
    size = 0
    try:
        loop = asyncio.get_running_loop()
        whole_at_s = loop.time() + WHOLE_S
        async with asyncio.timeout(IDLE_S) as limit:
            while True:
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
                limit.reschedule(min(loop.time() + IDLE_S, whole_at_s))
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


async def check_json(headers: Mapping[str, str], body: bytes, limit_bytes: int) -> None:
    """Refuse a body that is not JSON by its type, which no form of another website has, or holds too much.

    It is measured as bytes: no object is built yet."""
    kind = media_type(headers)
    if kind != JSON and not (kind.startswith("application/") and kind.endswith("+json")):
        raise Problem(
            415,
            "not_json",
            f"A body here is JSON, not {kind[:100] or 'nothing in particular'}.",
            cure=f"Send the header `Content-Type: {JSON}`.",
        )
    bounds = Bounds(limit_bytes, setting="web.max_body_bytes")
    try:
        if len(body) > LARGE_BYTES:
            # Beside the loop that serves the others.
            await asyncio.to_thread(measure_json, body, bounds, "The body")
        else:
            measure_json(body, bounds, "The body")
    except BoundExceeded as error:
        status, code, cure = _REFUSALS[error.exceeded]
        raise Problem(status, code, str(error), cure=cure) from None


_REFUSALS = {
    "bytes": (413, "too_large", "Send less at once; `web.max_body_bytes` is the limit."),
    "values": (413, "too_many_values", "Send less at once; `web.max_body_bytes` sets the limit, a value per 32 bytes."),
    "depth": (422, "too_deep", "Send flatter data, or put it into a string."),
    "numbers": (413, "too_many_values", "Send such numbers as text, or in several requests."),
}


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
