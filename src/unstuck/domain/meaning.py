"""Read what packed frames mean, for those who do not speak ZeroMQ: Python tasks, handles on jobs, people."""

import base64
import math
from collections.abc import Sequence
from typing import Any

import msgspec

from unstuck.domain.envelope import pack, read_any, read_map, read_object, unpack
from unstuck.domain.errors import PayloadError

OWN_ID = "JobID"
"""How a client names its own id in the parameters of a call."""
MAX_SHOWN = 100_000
"""Values in one frame that are shown one by one: a few bytes of CBOR can stand for any number."""
MAX_DEPTH = 100


def is_packed(data: bytes) -> bool:
    """Say whether these are packed frames: they begin as no JSON does."""
    return data[:1] != b"" and (0x90 <= data[0] <= 0x9F or data[0] in (0xDC, 0xDD))


def arguments(payload: bytes) -> dict[str, Any]:
    """Give the keyword arguments that a request holds, or raise PayloadError that says what would do."""
    found = _arguments(unpack(payload))
    if found is None:
        raise PayloadError(
            "they are no CBOR map and no JSON object with the names of the parameters. Send one such frame, or a map "
            "of options and one of parameters"
        )
    return found


def _arguments(frames: Sequence[bytes]) -> dict[str, Any] | None:
    if len(frames) == 2 and read_map(frames[0]) is not None:
        return read_map(frames[1])
    return read_object(frames[0]) if len(frames) == 1 else None


def speaks_cbor(payload: bytes) -> bool:
    """Say whether a request holds CBOR, so that its reply should too."""
    return any(read_map(frame) is not None for frame in unpack(payload))


def reply(value: Any, json: bytes, payload: bytes) -> bytes:
    """Pack what a Python task returned, in the language of the request; `json` is the value written so."""
    if not speaks_cbor(payload):
        return pack([json])
    import cbor2

    return pack([cbor2.dumps(value)])


def read_reply(result: bytes, payload: bytes) -> Any:
    """Give what the result of such a job means: a value, or a list of them where several frames came."""
    cbor_first = is_packed(payload) and speaks_cbor(payload)
    values = [_value(frame, cbor_first) for frame in unpack(result)]
    return values[0] if len(values) == 1 else values


def show_call(payload: bytes) -> tuple[list[Any], dict[str, Any]]:
    """Give the arguments of a request as plain values: by name where it has such, else one per frame."""
    try:
        frames = unpack(payload)
        named = _arguments(frames)
        if named is not None:
            return [], {name: shown(value) for name, value in named.items()}
        return [shown(_value(frame, False)) for frame in frames], {}
    except PayloadError:
        return [shown(payload)], {}


def show_reply(result: bytes, payload: bytes) -> Any:
    """Like `read_reply`, as plain values that can be written as JSON."""
    try:
        return shown(read_reply(result, payload))
    except PayloadError:
        return shown(result)


def shown(value: Any) -> Any:
    """Make plain what CBOR can say and JSON cannot; bytes become base64."""
    try:
        return _Plain().of(value, 0)
    except _TooMuchError:
        return "(too much to show)"


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


def _value(frame: bytes, cbor_first: bool) -> Any:
    if cbor_first and (found := read_any(frame)) is not None:
        return found[0]
    try:
        return msgspec.json.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    if (known := read_map(frame)) is not None:
        return known
    try:
        text = frame.decode("utf-8")
    except UnicodeDecodeError:
        text = None
    if text is not None and all(char.isprintable() or char.isspace() for char in text):
        return text
    found = read_any(frame)
    return frame if found is None else found[0]
