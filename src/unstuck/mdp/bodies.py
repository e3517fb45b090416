"""Turn Python values into frames and back: bytes travel as they are, everything else as CBOR."""

from collections.abc import Iterable
from typing import Any

import cbor2

from unstuck.domain.envelope import read_map
from unstuck.domain.errors import PayloadError


def frame_of(value: object) -> bytes:
    """Give the one frame of a value."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    try:
        return cbor2.dumps(value)
    except (cbor2.CBORError, RecursionError, ValueError, TypeError) as error:
        raise PayloadError(f"{value!r:.80} cannot be sent as CBOR: {error}") from error


def body_of(values: Iterable[object]) -> list[bytes]:
    """Give the body of a request: a frame for each value, and an empty one where there is none, as 0.1 wants one."""
    return [frame_of(value) for value in values] or [b""]


def reply_of(value: object) -> list[bytes]:
    """Give the body of a reply: bytes, several of them in a list or a tuple, or one value."""
    if isinstance(value, list | tuple) and value and all(isinstance(part, bytes) for part in value):
        return list(value)
    return [frame_of(value)]


def map_of(frame: bytes) -> dict[str, Any] | None:
    """Read a CBOR map with names for keys; None for anything else."""
    return read_map(frame)
