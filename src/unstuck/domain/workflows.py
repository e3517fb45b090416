"""States of workflows and nodes, and how results are passed from node to node."""

from enum import StrEnum
from typing import Any, Literal

import msgspec

from unstuck.domain.node_inputs import ALL, ERROR_KEY, NodeError, unpack_raw
from unstuck.domain.payload import decode_call, put_results

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
    instead = found.get(ALL, MISSING)
    put_results(call, {place: plain(found.get(place, instead)) for _, place in call.refs})
    return {"args": call.args, "kwargs": call.kwargs}


def plain(value: Any) -> Any:
    match value:
        case NodeError():
            return {ERROR_KEY: msgspec.to_builtins(value)}
        case list():
            return [plain(one) for one in value]
    return value
