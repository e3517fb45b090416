"""Read the first lines of a request: the target and the headers, within limits, each said once."""

import re
from collections.abc import Mapping

from starlette.types import Scope

from unstuck.http.guard.hosts import Host, read_host
from unstuck.http.problems import Problem

MAX_TARGET_BYTES = 8 * 1024
MAX_HEADER_BYTES = 32 * 1024
MAX_HEADERS = 100
ONCE = frozenset({"host", "authorization", "origin", "content-length", "content-type", "x-csrf-token"})
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
