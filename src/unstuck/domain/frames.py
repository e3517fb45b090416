"""The frames of ZeroMQ messages as payloads and results of jobs.

The bytes are opaque to everybody but the one who asked and the one who answers. A Python task gets the arguments that a
single frame holds, as a CBOR map or a JSON object.
"""

import base64
import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from unstuck.domain import bounds
from unstuck.domain.bounded_cbor import (
    build_cbor,
    count_cbor,
    count_cbor_fields,
    decode_cbor,
    decode_cbor_fields,
    is_cbor_map,
)
from unstuck.domain.bounded_json import build_json, count_json, decode_json, decode_json_fields
from unstuck.domain.bounds import MAX_SHOWN, TOO_MUCH, BoundExceeded, Bounds, NotDecodable, stored
from unstuck.errors import PayloadError

FRAMES = "frames"
"""The `payload_type` of such a job: its payload and its result are both packed so."""

MAX_FRAMES = 65_535
"""In one message: each frame is an object of its own."""
_MAX_BLANKS = 1_000
"""What stands before a JSON object may be blank, and is not searched for ever."""
_LONG_LIST = 0xDD
_NOTE = Bounds(1024 * 1024)
MAX_LOOKED_THROUGH = 1_000_000
"""Values in all frames of one message, which are walked through for a few entries in about 0.15 s."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[bytes])


def pack_frames(frames: Sequence[bytes]) -> bytes:
    return _encoder.encode(frames)


def unpack_frames(data: bytes) -> list[bytes]:
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


def read_fields_of_all(frames: Sequence[bytes], names: Collection[str]) -> list[dict[str, Any] | None] | None:
    """Return the entries with these names of each frame, or None if one of the frames is no CBOR map.

    All of them are looked into up to a bound that they share. In the place of a map that holds more stands None."""
    found: list[dict[str, Any] | None] = []
    left = MAX_LOOKED_THROUGH
    for frame in frames:
        if not is_cbor_map(frame):
            return None
        within = stored(frame)
        within = replace(within, values=min(within.values, left))
        try:
            fields, used = count_cbor_fields(frame, names, within, lenient=True)
            found.append(fields)
        except NotDecodable:
            return None
        except BoundExceeded:
            used = within.values
            found.append(None)
        left -= used
    return found


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


OWN_ID = "JobID"
"""How a client names its own id in the parameters of a call."""
MAX_DEPTH = 100
_CHUNK_CHARS = 64 * 1024


def is_packed(data: bytes) -> bool:
    """Say whether these are packed frames: they begin as no JSON does."""
    return data[:1] != b"" and (0x90 <= data[0] <= 0x9F or data[0] in (0xDC, 0xDD))


def arguments(payload: bytes) -> dict[str, Any]:
    """Return the keyword arguments that a request holds, or raise PayloadError that says what would do."""
    frames = unpack_frames(payload)
    found = _arguments(frames)
    if found is None:
        why = " ".join(filter(None, map(why_unreadable, frames[-2:])))
        raise PayloadError(
            "they are no CBOR map and no JSON object with the names of the parameters. "
            + (f"{why} " if why else "")
            + "Send one such frame, or a map of options and one of parameters"
        )
    return found


def named_arguments(payload: bytes, names: Collection[str]) -> dict[str, Any]:
    """Like `arguments`, only those with these names; no other is read."""
    frames = unpack_frames(payload)
    if len(frames) not in (1, 2):
        raise PayloadError("These frames are no map of options and one of parameters.")
    if len(frames) == 2 or is_cbor_map(frames[-1]):
        return decode_cbor_fields(frames[-1], names, stored(frames[-1]))
    return decode_json_fields(frames[0], names, stored(frames[0]))


def _arguments(frames: Sequence[bytes]) -> dict[str, Any] | None:
    if len(frames) == 2 and read_fields(frames[0], ()) is not None:
        return read_map(frames[1])
    return read_object(frames[0]) if len(frames) == 1 else None


def speaks_cbor(payload: bytes) -> bool:
    """Return whether a request holds CBOR, so that its reply should too."""
    return any(read_fields(frame, ()) is not None for frame in unpack_frames(payload))


def reply(value: Any, json: bytes, payload: bytes) -> bytes:
    """Pack what a Python task returned, in the language of the request; `json` is the value written so."""
    if not speaks_cbor(payload):
        return pack_frames([json])
    import cbor2

    return pack_frames([cbor2.dumps(value)])


def read_reply(result: bytes, payload: bytes) -> Any:
    """Return what the result of such a job means: a value, or a list of them if several frames came.

    Raise BoundExceeded if it holds too much."""
    cbor_first = is_packed(payload) and speaks_cbor(payload)
    values = _values(unpack_frames(result), stored(result), cbor_first)
    return values[0] if len(values) == 1 else values


def show_call(payload: bytes) -> tuple[list[Any], dict[str, Any]]:
    """Give the arguments of a request as plain values: by name where it has such, else one per frame."""
    try:
        frames = unpack_frames(payload)
        values = _values(frames, bounds.shown(payload), False, for_people=True)
    except PayloadError:
        return [shown(payload)], {}
    if _is_call(frames, values):
        return [], {name: shown(value) for name, value in values[-1].items()}
    return [shown(value) for value in values], {}


def _is_call(frames: Sequence[bytes], values: Sequence[Any]) -> bool:
    """Return whether these frames, which mean these values, are arguments by name."""
    if not values or not isinstance(values[-1], dict):
        return False
    return len(frames) == 1 or (len(frames) == 2 and all(map(is_cbor_map, frames)) and isinstance(values[0], dict))


def show_reply(result: bytes, payload: bytes) -> Any:
    """Like `read_reply`, as plain values that can be written as JSON."""
    try:
        cbor_first = is_packed(payload) and speaks_cbor(payload)
        values = _values(unpack_frames(result), bounds.shown(result), cbor_first, for_people=True)
    except PayloadError:
        return shown(result)
    return shown(values[0] if len(values) == 1 else values)


def shown(value: Any) -> Any:
    """Make plain what CBOR can say and JSON cannot; bytes become base64."""
    try:
        return _Plain().of(value, 0)
    except _TooMuchError:
        return TOO_MUCH


class _TooMuchError(Exception):
    pass


class _Plain:
    def __init__(self) -> None:
        self._left = MAX_SHOWN

    def of(self, value: Any, depth: int) -> Any:
        self._left -= 1
        if self._left < 0 or depth > MAX_DEPTH:
            raise _TooMuchError
        match value:
            case None | bool() | str() | int():
                return value
            case float():
                return value if math.isfinite(value) else str(value)
            case bytes() | bytearray() | memoryview():
                return {"base64": base64.b64encode(value).decode("ascii")}
            case list() | tuple() | set() | frozenset():
                return [self.of(one, depth + 1) for one in value]
            case dict():
                return {str(key): self.of(one, depth + 1) for key, one in value.items()}
        return str(value)


def _values(frames: Sequence[bytes], within: Bounds, cbor_first: bool, *, for_people: bool = False) -> list[Any]:
    """Return what each frame means; all of them together are within the bounds."""
    found = []
    for frame in frames:
        value, used = _value(frame, cbor_first, within, for_people)
        found.append(value)
        within = within.after(used)
    return found


def _value(frame: bytes, cbor_first: bool, within: Bounds, for_people: bool) -> tuple[Any, int]:
    """Return what a frame means, which is the frame itself if that cannot be told, and how many values that is."""
    for read in (_cbor, _json, _text) if cbor_first else (_json, _cbor_map, _text, _cbor):
        try:
            return read(frame, within)
        except NotDecodable:
            pass
        except BoundExceeded:
            if not for_people:
                raise
            # Nothing is left for the frames behind it, or each of them would be walked as far.
            return TOO_MUCH, within.values
    return frame, 1


def _json(frame: bytes, bounds: Bounds) -> tuple[Any, int]:
    # Only arrays and objects can be more than their bytes; prose, with all its commas, is not measured.
    used = count_json(frame, bounds, "The result") if begins_as_json(frame) else 1
    return build_json(frame), used


def _cbor(frame: bytes, bounds: Bounds) -> tuple[Any, int]:
    used = count_cbor(frame, bounds, "The result")
    return build_cbor(frame), used


def _cbor_map(frame: bytes, bounds: Bounds) -> tuple[Any, int]:
    if not is_cbor_map(frame):
        raise NotDecodable("This is not a map.")
    return _cbor(frame, bounds)


def _text(frame: bytes, bounds: Bounds) -> tuple[str, int]:
    try:
        text = frame.decode("utf-8")
    except UnicodeDecodeError as error:
        raise NotDecodable(f"This is not text: {error}.") from None
    chunks = (text[start : start + _CHUNK_CHARS] for start in range(0, len(text), _CHUNK_CHARS))
    if not all("".join(chunk.split()).isprintable() for chunk in chunks):
        raise NotDecodable("This is not text for people.")
    return text, 1
