"""Know a request that is sent again by its `Idempotency-Key`."""

import hashlib
from typing import Annotated

import msgspec
from fastapi import Header

from unstuck.http.callers import Caller
from unstuck.http.problems import Problem
from unstuck.store.records import Request

KEPT_S = 24 * 3600.0
MAX_KEY_CHARS = 255
REPEATED = {"Idempotency-Replayed": "true"}

IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=MAX_KEY_CHARS,
        description="A text of your own, new for each request. Sent again with the same key within a day, the request "
        "stores nothing and gets the first answer, also where the job has ended by then.",
    ),
]


def request_of(caller: Caller, key: str, kind: str, asked: object) -> Request:
    """Say which request it is, and what it asks for."""
    return Request(_hash((caller.token_id, key)), _hash((kind, asked)), KEPT_S)


def used_before() -> Problem:
    return Problem(
        422,
        "key_used_before",
        "This Idempotency-Key came with another request within the last day.",
        cure="Use a new key for each request, and the same only to send the very same again.",
    )


def _hash(value: object) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode(value)).digest()
