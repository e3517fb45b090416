"""Workflows and their nodes: records and protocol."""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from unstuck.domain.states import JobState
from unstuck.domain.workflows import NodeKind, NodeState, OnError, WorkflowState
from unstuck.ledger.contract.jobs import Enqueued, NewJob, OnceAnswer, Request


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


class Workflows(Protocol):
    """Begin workflows, read them, retry and resume them."""

    def begin(self, workflow: NewWorkflow) -> Enqueued:
        """Store a workflow and the jobs of the nodes that wait for nothing, all or none. Repeats itself safely."""
        ...

    def begin_on(self, connection: Any, workflow: NewWorkflow) -> Enqueued:
        """Store a workflow inside the caller's own transaction; nothing is committed here."""
        ...

    def begin_once(self, request: Request, workflow: NewWorkflow) -> OnceAnswer:
        """The same, unless a request with this key did so before, also where that workflow has ended."""
        ...

    def get(self, workflow_id: int) -> WorkflowRecord | None:
        """Return a workflow with its nodes, in the order of their places."""
        ...

    def place_of(self, job_id: int) -> tuple[int, int] | None:
        """Return the workflow that a job belongs to and its place there (0: it stands for it); None for most jobs."""
        ...

    def inputs(self, job_ids: Sequence[int]) -> dict[int, bytes]:
        """Return how the nodes ended that each of these jobs depends on, packed as `domain.node_inputs` does."""
        ...

    def retry(self, workflow_id: int, by: str) -> bool:
        """Take up a workflow that failed, was cancelled or is paused: what failed is tried again, what was not begun
        may begin. False where there is none, or it goes on or succeeded."""
        ...

    def resume(self, workflow_id: int, by: str) -> bool:
        """Go on past what is paused: those who depend on it get its error. False where it is not paused."""
        ...

    def list(self, state: str | None = None, before_id: int | None = None, limit: int = 100) -> list[WorkflowRecord]:
        """Return workflows without their nodes, the newest first."""
        ...
