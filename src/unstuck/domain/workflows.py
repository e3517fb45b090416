"""States of workflows and nodes, and how results are passed from node to node."""

from collections import Counter
from enum import StrEnum
from typing import Any, Literal

import msgspec

from unstuck.domain import node_inputs
from unstuck.domain.node_inputs import ALL, ERROR_KEY, NodeError, unpack_raw
from unstuck.domain.payload import Call, decode_call, put_results

OnError = Literal["fail", "continue", "pause"]
NodeKind = Literal["task", "map", "group"]

MAX_NODES = 10_000
MAX_EDGES = 100_000
"""A node that comes after another. What a group comes after, each node in it does."""
MAX_ITEMS = 10_000
MAX_NAME_CHARS = 200
TASK = "unstuck.workflow"
"""The task of the job that stands for a workflow. No worker knows it: it is ended by the ends of its nodes."""
AWAITED = "workflow"


class WorkflowState(StrEnum):
    RUNNING = "running"
    PAUSED = "paused"
    """A node failed, and waits for an operator; what does not depend on it goes on."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class NodeState(StrEnum):
    WAITING = "waiting"
    """For those that it depends on."""
    RELEASED = "released"
    """Its job is there; of a group or map: what is in it goes on."""
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


MISSING = NodeError(code="RESULT_NOT_AVAILABLE", message="Its result is not there any more")


def call_with_results(payload: bytes, inputs: bytes) -> dict[str, Any]:
    """Give both members of the call, so that no language needs to know of references. What did not succeed stands
    there as `{"$error": {"code": ..., ...}}`, in lists too. Results are `msgspec.Raw`: JSON, and never built here."""
    call = decode_call(payload)
    found = unpack_raw(inputs)
    most_bytes = most_filled_bytes(len(payload) + len(inputs))
    if _filled_bytes(call, found) > most_bytes:
        found = unpack_raw(node_inputs.refused(f"its references stand for more than {most_bytes:,} bytes together"))
    instead = found.get(ALL, MISSING)
    put_results(call, {place: plain(found.get(place, instead)) for _, place in call.refs})
    return {"args": call.args, "kwargs": call.kwargs}


MOST_COPIES = 8
SMALL_BYTES = 64 * 1024
"""What references may always stand for, however small the call is."""


def most_filled_bytes(stored_bytes: int) -> int:
    """Return how large the results in a call may be together, by what is stored of it: a reference has a few bytes,
    and one result may be referred to any number of times."""
    return max(stored_bytes, min(node_inputs.MAX_BYTES, MOST_COPIES * stored_bytes + SMALL_BYTES))


def _filled_bytes(call: Call, found: dict[int, Any]) -> int:
    """Return how many bytes all references of a call stand for."""
    times = Counter(place for _, place in call.refs)
    instead = found.get(ALL, MISSING)
    return sum(count * _json_bytes(found.get(place, instead)) for place, count in times.items())


def _json_bytes(value: Any) -> int:
    match value:
        case msgspec.Raw():
            return len(memoryview(value))
        case list():
            return 2 + sum(1 + _json_bytes(one) for one in value)
    return len(msgspec.json.encode(plain(value)))


def plain(value: Any) -> Any:
    match value:
        case NodeError():
            return {ERROR_KEY: msgspec.to_builtins(value)}
        case list():
            return [plain(one) for one in value]
    return value
