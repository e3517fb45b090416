"""Limits per caller: request rate, open requests, size of heads and bodies."""

import asyncio
import re
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol
from urllib.parse import parse_qs

from starlette.types import Message, Receive, Scope

from unstuck.domain.bounded_json import check_json as measure_json
from unstuck.domain.bounds import BoundExceeded, Bounds
from unstuck.http.auth.origins import Host, read_host
from unstuck.http.auth.shared_counters import Member, SharedBuckets
from unstuck.http.problems import Problem

MAX_CALLERS = 10_000


class Buckets(Protocol):
    """What is left to each caller, and since when."""

    def get(self, who: str, full: float) -> tuple[float, float]: ...

    def put(self, who: str, left: float, at_s: float) -> None: ...


class OwnBuckets:
    """Those of one process."""

    def __init__(self) -> None:
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def get(self, who: str, full: float) -> tuple[float, float]:
        return self._buckets.get(who, (full, 0.0))

    def put(self, who: str, left: float, at_s: float) -> None:
        self._buckets[who] = (left, at_s)
        self._buckets.move_to_end(who)
        if len(self._buckets) > MAX_CALLERS:
            self._buckets.popitem(last=False)


class RateLimiter:
    """A bucket per caller: it holds `burst`, and fills by `per_s`. Those not seen for the longest are forgotten."""

    def __init__(
        self,
        per_s: float,
        burst: float,
        clock: Callable[[], float] = time.monotonic,
        shared: SharedBuckets | None = None,
    ) -> None:
        self._per_s = per_s
        self._burst = burst
        self._clock = clock
        self._buckets: Buckets = OwnBuckets() if shared is None else shared

    def wait_s(self, who: str) -> float:
        """Give how long this caller has to wait; 0.0: it may ask now."""
        left = self._left(who)
        return 0.0 if left >= 1 or self._per_s <= 0 else (1 - left) / self._per_s

    def take(self, who: str) -> float:
        """Count one more, and give how long this caller has to wait; 0.0: not at all."""
        wait_s = self.wait_s(who)
        if wait_s == 0.0 and self._per_s > 0:
            self._buckets.put(who, self._left(who) - 1, self._clock())
        return wait_s

    def _left(self, who: str) -> float:
        left, at_s = self._buckets.get(who, self._burst)
        return min(self._burst, left + (self._clock() - at_s) * self._per_s)


class ConcurrencyLimit:
    def __init__(self, most: int, most_each: int, member: Member | None = None) -> None:
        self._most = most
        self._most_each = most_each
        self._open: Counter[str] = Counter()
        self._total = 0
        self._shared = None if member is None else member.group.open_requests
        self._number = 0 if member is None else member.number

    def is_full(self, who: str) -> bool:
        total, own = (0, 0) if self._shared is None else self._shared.elsewhere(self._number, who)
        return self._total + total >= self._most or self._open[who] + own >= self._most_each

    @contextmanager
    def place_for(self, who: str) -> Iterator[None]:
        self._open[who] += 1
        self._total += 1
        if self._shared is not None:
            self._shared.note(self._number, who, 1)
        try:
            yield
        finally:
            if self._shared is not None:
                self._shared.note(self._number, who, -1)
            self._total -= 1
            self._open[who] -= 1
            if not self._open[who]:
                del self._open[who]


MAX_TARGET_BYTES = 8 * 1024
MAX_HEADER_BYTES = 32 * 1024
MAX_HEADERS = 100
ONCE = frozenset({"host", "authorization", "origin", "content-length", "content-type"})
"""Said twice, two readers could understand two things."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def check_lengths(scope: Scope) -> None:
    target = len(scope.get("raw_path") or scope["path"].encode()) + len(scope.get("query_string", b""))
    if target > MAX_TARGET_BYTES:
        raise Problem(414, "uri_too_long", f"The address is longer than {MAX_TARGET_BYTES} bytes.")
    headers = scope["headers"]
    if len(headers) > MAX_HEADERS or sum(len(name) + len(value) for name, value in headers) > MAX_HEADER_BYTES:
        raise Problem(431, "headers_too_large", f"The headers are longer than {MAX_HEADER_BYTES} bytes, or too many.")
    if _CONTROL.search(scope["path"]):
        raise Problem(400, "not_valid", "The address has a control character in it.")


def headers_of(scope: Scope) -> dict[str, str]:
    headers: dict[str, str] = {}
    for raw_name, raw_value in scope["headers"]:
        name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
        if name in headers and name in ONCE:
            raise Problem(400, "not_valid", f"The header {name} is there twice.")
        headers[name] = f"{headers[name]}; {value}" if name in headers else value
    if "content-length" in headers and "transfer-encoding" in headers:
        # The old trick: a proxy believes the one and we the other, and a second request hides in the first.
        raise Problem(400, "not_valid", "The body says twice how long it is.")
    return headers


def host_of(headers: Mapping[str, str]) -> Host:
    host = read_host(headers.get("host", ""))
    if host is None:
        raise Problem(400, "not_valid", "The Host header is missing, or is none.", cure="Send one, as HTTP/1.1 asks.")
    return host


def unread_bytes(scope: Scope) -> int | None:
    """Give how long the body says it is; None where it does not say, or is long."""
    said = {name.lower(): value for name, value in scope["headers"]}
    if b"transfer-encoding" in said:
        return None
    declared = said.get(b"content-length", b"0")
    return int(declared) if declared.isdigit() and len(declared) <= 5 else None


PAUSES_OF_A_BODY = 6
"""How many of the longest pauses the whole of a body may take."""
MAX_FORM_FIELDS = 2_000
MAX_FORM_BYTES = 256 * 1024
"""Of a form of the dashboard: a thousand ids of jobs, and some words."""
LARGE_BYTES = 256 * 1024
SMALL_BODY_BYTES = 64 * 1024
"""A body up to this size waits for no room before it is read: it is in a buffer already."""
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


async def read_body(
    receive: Receive,
    headers: Mapping[str, str],
    limit_bytes: int,
    timeout_s: float,
    make_room: Callable[[], Awaitable[object]] | None = None,
) -> bytes:
    """Read the whole body within the limits of size and time; `timeout_s` limits each pause.

    `make_room` is called when more than a small body has come, and before the rest is read."""
    declared_bytes(headers, limit_bytes)
    parts: list[bytes] = []
    size = 0
    try:
        loop = asyncio.get_running_loop()
        whole_at_s = loop.time() + PAUSES_OF_A_BODY * timeout_s
        async with asyncio.timeout(timeout_s) as limit:
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
                if make_room is not None and size > SMALL_BODY_BYTES:
                    limit.reschedule(None)
                    waited_from_s = loop.time()
                    await make_room()
                    whole_at_s += loop.time() - waited_from_s
                    make_room = None
                limit.reschedule(min(loop.time() + timeout_s, whole_at_s))
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
    bounds = Bounds(limit_bytes, setting="http.max_body_bytes")
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
    "bytes": (413, "too_large", "Send less at once; `http.max_body_bytes` is the limit."),
    "values": (413, "too_many_values", "Send less at once; `http.max_body_bytes` is the limit, a value per 32 bytes."),
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
        cure="Send less at once; `http.max_body_bytes` is the limit.",
    )
