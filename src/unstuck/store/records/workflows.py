"""What a workflow is when it is stored, and what people see of it."""

from typing import Any

import msgspec

from unstuck.domain.states import JobState
from unstuck.domain.workflow import NodeKind, NodeState, OnError, WorkflowState
from unstuck.store.records.handing import NewJob


class NewNode(msgspec.Struct, frozen=True):
    place: int
    parent: int | None
    """The scope that it is in; None for the outermost, which is place 0."""
    name: str
    kind: NodeKind
    on_error: OnError = "fail"
    source: int | None = None
    """Of a map, whose result is the list; of a group, whose result is its own."""
    job: NewJob | None = None
    """Of a task what its job will be, of a map what those of its members will be."""


class NewEdge(msgspec.Struct, frozen=True):
    source: int
    target: int
    data: bool = False
    """The target gets the source's result."""


class NewWorkflow(msgspec.Struct, frozen=True):
    name: str
    root: NewJob
    """The job that stands for it."""
    nodes: tuple[NewNode, ...]
    edges: tuple[NewEdge, ...]

    def blockers(self) -> dict[int, int]:
        """Give how many others each node waits for."""
        return _counted(edge.target for edge in self.edges)

    def members(self) -> dict[int, int]:
        """Give how many are in each scope."""
        return _counted(node.parent for node in self.nodes if node.parent is not None)


def _counted(places: Any) -> dict[int, int]:
    counts: dict[int, int] = {}
    for place in places:
        counts[place] = counts.get(place, 0) + 1
    return counts


class NodeRecord(msgspec.Struct, frozen=True):
    place: int
    parent: int | None
    name: str
    kind: NodeKind
    state: NodeState
    on_error: OnError
    job_id: int | None
    job_state: JobState | None
    task: str | None
    started_at: float | None
    finished_at: float | None
    error: dict[str, Any] | None
    item: int | None
    blockers: int
    after: tuple[int, ...] = ()
    """The places that it waits for, or waited for."""


class WorkflowRecord(msgspec.Struct, frozen=True):
    id: int
    name: str
    state: WorkflowState
    created_at: float
    finished_at: float | None
    nodes: tuple[NodeRecord, ...] = ()
    """Only where one workflow was asked for, without its outermost scope."""
    counts: dict[str, int] = {}
    """How many nodes (tasks) are in each state."""


class Repaired(msgspec.Struct, frozen=True):
    workflow_id: int
    what: str
