"""Pack how those ended that a job depends on, for its way from the ledger to the runner that needs them.

Results are opaque on that way: they are unpacked where user code runs, and nowhere else.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

ITEM = -1
"""The place under which a member of a map finds its own item."""


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


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Part])


def pack(parts: Iterable[Part]) -> bytes:
    return _encoder.encode(list(parts))


def unpack(data: bytes) -> dict[int, Any]:
    """Give by place what each node came to: a value, a NodeError, or a list of those."""
    found: dict[int, Any] = {}
    for part in _decoder.decode(data) if data else ():
        if not part.is_list:
            found[part.place] = _value(part)
        elif part.item is None:
            found[part.place] = []
        else:
            found.setdefault(part.place, []).append(_value(part))
    return found


def _value(part: Part) -> Any:
    if part.error is not None:
        return part.error
    return None if part.result is None else msgspec.json.decode(part.result)


ERROR_KEY = "$error"
"""How an error stands inside the JSON that a whole workflow came to."""


def with_errors(value: Any) -> Any:
    """Turn what stands for errors in the result of a workflow into NodeErrors."""
    match value:
        case {"$error": dict(facts)} if len(value) == 1:
            return msgspec.convert(facts, NodeError)
        case list():
            return [with_errors(one) for one in value]
    return value
