"""Keep the frames of a message as they came: payloads and results of jobs that come over ZeroMQ.

The bytes are opaque to everybody but the one who asked and the one who answers. A Python task gets the arguments that a
single frame holds, as a CBOR map or a JSON object.
"""

from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from unstuck.domain.bounded import BoundExceeded, Bounds, NotDecodable, stored
from unstuck.domain.bounded_cbor import decode_cbor, decode_cbor_fields, is_cbor_map
from unstuck.domain.bounded_json import build_json, decode_json, decode_json_fields
from unstuck.domain.errors import PayloadError

FRAMES = "frames"
"""The `payload_type` of such a job: its payload and its result are both packed so."""

MAX_FRAMES = 65_535
"""In one message: each frame is an object of its own."""
_MAX_BLANKS = 1_000
"""What stands before a JSON object may be blank, and is not searched for ever."""
_LONG_LIST = 0xDD
_NOTE = Bounds(1024 * 1024)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[bytes])


def pack(frames: Sequence[bytes]) -> bytes:
    return _encoder.encode(frames)


def unpack(data: bytes) -> list[bytes]:
    if data[:1] == bytes([_LONG_LIST]) and (count := int.from_bytes(data[1:5])) > MAX_FRAMES:
        raise PayloadError(f"These are {count:,} packed frames; at most {MAX_FRAMES:,} are read.")
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise PayloadError(f"These are no packed frames: {error}.") from None


def read_object(frame: bytes) -> dict[str, Any] | None:
    """Return the CBOR map or JSON object that a frame holds; None for anything else."""
    found = read_map(frame)
    return read_json_object(frame) if found is None else found


def read_note(frame: bytes) -> dict[str, Any] | None:
    """Return the CBOR map in which a peer says something about itself or its work; None for anything else."""
    return read_map(frame, _NOTE)


def read_map(frame: bytes, bounds: Bounds | None = None) -> dict[str, Any] | None:
    """Return the CBOR map with text for keys that a frame is, as a whole; None for anything else."""
    # Most bodies are none, which their first byte tells.
    if not is_cbor_map(frame):
        return None
    try:
        found: dict[str, Any] = decode_cbor(frame, bounds or stored(frame))
    except (NotDecodable, BoundExceeded):
        return None
    return found


def read_json_object(frame: bytes) -> dict[str, Any] | None:
    if not _begins_as_object(frame):
        return None
    try:
        value = decode_json(frame, stored(frame))
    except (NotDecodable, BoundExceeded):
        return None
    return value if isinstance(value, dict) else None


def read_fields(frame: bytes, names: Collection[str]) -> dict[str, Any] | None:
    """Return the entries with these names of the CBOR map that a frame is; None for anything else.

    A map that holds too much to look into has none of them."""
    if not is_cbor_map(frame):
        return None
    try:
        return decode_cbor_fields(frame, names, stored(frame), lenient=True)
    except NotDecodable:
        return None
    except BoundExceeded:
        return {}


def read_json_fields(frame: bytes, names: Collection[str]) -> dict[str, Any] | None:
    """Like `read_fields`, of a JSON object."""
    if not _begins_as_object(frame):
        return None
    try:
        return decode_json_fields(frame, names, stored(frame))
    except NotDecodable:
        return None
    except BoundExceeded:
        return {}


def why_unreadable(frame: bytes) -> str:
    """Return why a frame is no CBOR map and no JSON object, in a sentence; empty if it does not even begin as one."""
    try:
        if is_cbor_map(frame):
            decode_cbor(frame, stored(frame), "The CBOR map")
        elif _begins_as_object(frame):
            decode_json(frame, stored(frame), "The JSON object")
    except (NotDecodable, BoundExceeded) as error:
        return str(error)
    return ""


def read_value(frame: bytes) -> Any:
    """Return what one frame means: JSON, a CBOR map, or text. Raise ValueError if it is none of them, or too much."""
    try:
        return decode_json(frame, stored(frame)) if begins_as_json(frame) else build_json(frame)
    except NotDecodable:
        pass
    found = read_map(frame)
    return frame.decode("utf-8") if found is None else found


def write_map(value: dict[str, Any]) -> bytes:
    import cbor2

    return cbor2.dumps(value)


def begins_as_json(frame: bytes) -> bool:
    """Return whether a frame begins as a JSON array or object does."""
    return frame[:_MAX_BLANKS].lstrip()[:1] in (b"[", b"{")


def _begins_as_object(frame: bytes) -> bool:
    return frame[:_MAX_BLANKS].lstrip()[:1] == b"{"
