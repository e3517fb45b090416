"""Pack how those ended that a job depends on, for its way from the ledger to the runner that needs them.

Results are opaque on that way: they are unpacked where user code runs, and nowhere else.
"""

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

ITEM = -1
"""The place under which a member of a map finds its own item."""
ALL = -2
"""The place of an error that stands for everything that a node is given."""


class NodeError(msgspec.Struct, frozen=True, kw_only=True):
    """What a node that did not succeed is to those who depend on it, where its `on_error` is "continue"."""

    code: str
    """`TASK_FAILED`, `WORKER_CRASHED`, `TASK_CANCELLED`, `RESULT_NOT_AVAILABLE`, …"""
    message: str = ""
    cause: str | None = None
    node: str | None = None
    job_id: int | None = None


class Part(msgspec.Struct, frozen=True, array_like=True):
    """One result, or why there is none."""

    place: int
    is_list: bool
    """It is a member of a list: the result of a map."""
    item: int | None
    """Which one; None in a list: it is empty."""
    result: bytes | None = None
    error: NodeError | None = None


MAX_BYTES = 64 * 1024 * 1024
"""How large the results that one node is given may be together."""
TOO_LARGE = "INPUTS_TOO_LARGE"

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Part])


def pack_inputs(parts: Iterable[Part]) -> bytes:
    """Pack these parts, or only an error if they are too large together. Parts beyond that are not asked for."""
    packed: list[Part] = []
    size = 0
    for part in parts:
        size += len(part.result or b"")
        if size > MAX_BYTES:
            return refused()
        packed.append(part)
    return _encoder.encode(packed)


def refused(why: str | None = None) -> bytes:
    """Pack the error that stands for results which are too large together."""
    why = why or f"the results that it is given are over {MAX_BYTES:,} bytes together"
    cause = f"{why}. Store large data elsewhere and return references to it"
    error = NodeError(code=TOO_LARGE, message="The results that it is given are too large", cause=cause)
    return _encoder.encode([Part(ALL, False, None, error=error)])


def unpack_inputs(data: bytes) -> dict[int, Any]:
    """Give by place what each node came to: a value, a NodeError, or a list of those."""
    return _by_place(data, read_result)


def unpack_raw(data: bytes) -> dict[int, Any]:
    """Like `unpack`, with each value as the JSON that it is stored as: nothing is built of it."""
    return _by_place(data, msgspec.Raw)


def _by_place(data: bytes, read: Callable[[bytes], Any]) -> dict[int, Any]:
    found: dict[int, Any] = {}
    for part in _decoder.decode(data) if data else ():
        if not part.is_list:
            found[part.place] = _value(part, read)
        elif part.item is None:
            found[part.place] = []
        else:
            found.setdefault(part.place, []).append(_value(part, read))
    return found


def _value(part: Part, read: Callable[[bytes], Any]) -> Any:
    if part.error is not None:
        return part.error
    return None if part.result is None else read(part.result)


ERROR_KEY = "$error"
"""How a NodeError is written in JSON."""
_MARK = f'"{ERROR_KEY}"'.encode()


def read_result(data: bytes) -> Any:
    """Return the value of a result or an entry in JSON, with the NodeErrors that are in it."""
    value = msgspec.json.decode(data)
    if not has_errors(data):
        return value
    try:
        return with_errors(value)
    except RecursionError:
        return value


def has_errors(data: bytes) -> bool:
    """Return whether there may be a NodeError in this JSON. Most values have none, and are not walked through."""
    return _MARK in data


def write_error(value: object) -> Any:
    """Return a NodeError as JSON has it; raise TypeError for any other value, as an encoder expects."""
    if isinstance(value, NodeError):
        return {ERROR_KEY: msgspec.to_builtins(value)}
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def with_errors(value: Any) -> Any:
    """Turn what stands for errors in a value into NodeErrors."""
    match value:
        case {"$error": {"code": str()} as facts} if len(value) == 1:
            try:
                return msgspec.convert(facts, NodeError)
            except msgspec.ValidationError:
                return value
        case list():
            return [with_errors(one) for one in value]
        case dict():
            return {key: with_errors(one) for key, one in value.items()}
    return value
