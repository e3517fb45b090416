"""Name the parts of a workflow and what may happen to them."""

from enum import StrEnum
from typing import Literal

OnError = Literal["fail", "continue", "pause"]
NodeKind = Literal["task", "map", "group"]

MAX_NODES = 10_000
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
