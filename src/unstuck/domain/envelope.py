"""Keep the frames of a message as they came: payloads and results of jobs that come over ZeroMQ.

The bytes are opaque to everybody but the one who asked and the one who answers. A Python task gets the arguments that a
single frame holds, as a CBOR map or a JSON object.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from unstuck.domain.errors import PayloadError

FRAMES = "frames"
"""The `payload_type` of such a job: its payload and its result are both packed so."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[bytes])


def pack(frames: Sequence[bytes]) -> bytes:
    return _encoder.encode(frames)


def unpack(data: bytes) -> list[bytes]:
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise PayloadError(f"These are no packed frames: {error}.") from None


def read_object(frame: bytes) -> dict[str, Any] | None:
    """Give the CBOR map or JSON object that a frame holds; None for anything else."""
    found = read_map(frame)
    return read_json_object(frame) if found is None else found


def read_map(frame: bytes) -> dict[str, Any] | None:
    """Give the CBOR map with names for keys that a frame is, as a whole; None for anything else."""
    # The first byte of a map, told before anything is decoded: most bodies are none.
    if not frame or not (0xA0 <= frame[0] <= 0xBF or frame[0] == 0xD9):
        return None
    found = read_any(frame)
    if found is None or not isinstance(found[0], dict) or not all(isinstance(key, str) for key in found[0]):
        return None
    return found[0]


def read_json_object(frame: bytes) -> dict[str, Any] | None:
    if frame.lstrip()[:1] != b"{":
        return None
    try:
        value = msgspec.json.decode(frame)
    except (msgspec.DecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_value(frame: bytes) -> Any:
    """Give what one frame means: JSON, a CBOR map, text; else it cannot be told. Raises ValueError for that."""
    try:
        return msgspec.json.decode(frame)
    except (msgspec.DecodeError, RecursionError):
        pass
    found = read_map(frame)
    return frame.decode("utf-8") if found is None else found


def write_map(value: dict[str, Any]) -> bytes:
    import cbor2

    return cbor2.dumps(value)


def read_any(frame: bytes) -> tuple[Any] | None:
    """Give the one CBOR value that a frame is, as a whole; None for anything else."""
    try:
        import cbor2
    except ModuleNotFoundError as error:
        cure = "pip install 'unstuck[mdp]'"
        raise PayloadError(f"CBOR cannot be read without more packages: {cure}. ({error})") from None
    from io import BytesIO

    stream = BytesIO(frame)
    try:
        value = cbor2.CBORDecoder(stream).decode()
    except Exception:  # noqa: BLE001 - bytes of a stranger: whatever the decoder makes of them, they are no map
        return None
    return (value,) if stream.tell() == len(frame) else None
