"""Turn arguments and results into bytes and back: JSON, strict, bounded. No pickle, anywhere."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from unstuck.domain.node_inputs import has_errors, read_result, with_errors, write_error
from unstuck.errors import PayloadError

JSON = "json"

# A NodeError may stand wherever a value may: a task passes on what it was given.
_encoder = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":"), check_circular=True, default=write_error
)


class Call(msgspec.Struct, frozen=True):
    """The arguments of a job."""

    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    trace: str = ""
    """Where its enqueue stands in a trace, as `unstuck.tracing` writes it."""
    scheduled_for: float | None = None
    """The tick that it was enqueued for, where a schedule did so."""
    refs: list[tuple[list[str | int], int]] = []
    """Of a node of a workflow: where among the arguments the result of which place goes."""


def encode_result(value: Any, task: str, limit_bytes: int) -> bytes:
    """Return the JSON of what a task returned."""
    return encode(value, f"The result of {task!r}", limit_bytes)


def encode(value: Any, what: str, limit_bytes: int) -> bytes:
    """Return the JSON of a value, which may be or hold a NodeError, or raise PayloadError that names `what` and the
    cure."""
    if value is None:
        return b"null"
    try:
        data = _encoder.encode(value).encode("utf-8")
    except (TypeError, RecursionError) as error:
        raise PayloadError(
            f"{what} cannot be written as JSON: {error}. Use None, bool, numbers, str, list and dict, "
            "and turn anything else into those."
        ) from error
    except UnicodeEncodeError as error:
        raise PayloadError(
            f"{what} cannot be written: a lone surrogate is no text. Decode it properly, or pass it as base64."
        ) from error
    except ValueError as error:
        raise PayloadError(f"{what} cannot be written as JSON: {error}. NaN and Infinity are not JSON.") from error
    if len(data) > limit_bytes:
        raise PayloadError(
            f"{what} cannot be stored: {len(data):,} bytes are over the limit of {limit_bytes:,}. Store the data "
            "elsewhere and pass a reference, or raise max_payload_bytes."
        )
    return data


def encode_call(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    task: str,
    limit_bytes: int,
    trace: str = "",
    refs: Sequence[tuple[list[str | int], int]] = (),
) -> bytes:
    value: dict[str, Any] = {}
    if args:
        value["args"] = args
    if kwargs:
        value["kwargs"] = kwargs
    if trace:
        value["trace"] = trace
    if refs:
        value["refs"] = refs
    return encode(value, f"The arguments of {task!r}", limit_bytes)


def with_fire_time(data: bytes, tick: float) -> bytes:
    """Add the tick to the arguments of a job, as `encode_call` wrote them, without reading what is in them."""
    assert data.startswith(b"{"), "arguments are a JSON object"
    return b'{"scheduled_for":%r%s' % (tick, b"}" if data == b"{}" else b"," + data[1:])


def decode_call(data: bytes) -> Call:
    """Return the call as JSON has it."""
    return msgspec.json.decode(data, type=Call)


def read_call(data: bytes) -> Call:
    """Return the call with the NodeErrors that are in its arguments, as user code gets it."""
    call = decode_call(data)
    if not has_errors(data):
        return call
    try:
        args, kwargs = with_errors(call.args), {name: with_errors(value) for name, value in call.kwargs.items()}
    except RecursionError:
        return call
    return msgspec.structs.replace(call, args=args, kwargs=kwargs)


def put_results(call: Call, results: Mapping[int, Any]) -> None:
    """Put the results of others where they belong among the arguments; KeyError names a place that is missing."""
    for path, place in call.refs:
        target: Any = {"args": call.args, "kwargs": call.kwargs}
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = results[place]


def decode(data: bytes | None) -> Any:
    """Return a value with the NodeErrors that are in it."""
    return None if data is None else read_result(data)
