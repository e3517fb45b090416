"""Workflows as they come in, and as they are shown."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, StrictInt

from unstuck.client.enqueueing import MAX_PRIORITY, MAX_UNIQUE_KEY_CHARS
from unstuck.domain import names, workflow
from unstuck.domain.workflow import MAX_NODES, NodeKind, OnError, WorkflowState
from unstuck.http.models.base import Asked, Given, Instant

EXAMPLE: dict[str, Any] = {
    "name": "sums",
    "nodes": [
        {"name": "first", "task": "add", "args": [1, 2]},
        {"name": "second", "task": "add", "args": [{"$node": "first"}, 4]},
    ],
}

NodeName = Annotated[str, Field(min_length=1, max_length=workflow.MAX_NAME_CHARS)]


class NewNodeBody(Asked):
    """A call of a task; with `map` one call for each item of another node's result; with `nodes` a group."""

    name: NodeName | None = Field(default=None, description="Else it is called as its task.")
    task: str | None = Field(
        default=None, min_length=1, max_length=names.MAX_NAME_CHARS, description="A task that some worker has."
    )
    args: list[Any] = Field(
        default=[], description='Arguments by place. `{"$node": NAME}` stands for the result of an earlier node.'
    )
    kwargs: dict[str, Any] = Field(default={}, description="Arguments by name, with references as in `args`.")
    map: NodeName | None = Field(
        default=None, description="Call the task for each item of this node's result, as its first argument."
    )
    after: list[NodeName] = Field(default=[], description="Begin when these have ended, without their results.")
    on_error: OnError = Field(default="fail", description="What its failure means.")
    nodes: list["NewNodeBody"] | None = Field(default=None, max_length=MAX_NODES, description="Of a group, its nodes.")
    result: NodeName | None = Field(default=None, description="Of a group: whose result is its own. Else the last's.")


class NewWorkflowBody(Asked):
    model_config = ConfigDict(json_schema_extra={"examples": [EXAMPLE]})

    name: NodeName
    nodes: list[NewNodeBody] = Field(
        min_length=1, max_length=MAX_NODES, description="Each after those that it depends on."
    )
    result: NodeName | None = Field(default=None, description="Whose result is that of the whole. Else the last's.")
    priority: StrictInt = Field(default=0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    unique_key: str | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_UNIQUE_KEY_CHARS,
        description="At most one unfinished workflow has it: where there is one, it is given back, `fresh` is false.",
    )


class WorkflowStored(Given):
    id: int = Field(description="Also the number of the job that stands for it: its result is that of the workflow.")
    name: str
    fresh: bool = Field(description="False: an unfinished workflow with the same `unique_key` was there already.")
    warning: str | None = Field(description="Says that no living worker would take some node now; it stays queued.")


class WorkflowSummary(Given):
    id: int
    name: str
    state: WorkflowState
    created_at: Instant
    finished_at: Instant | None
    counts: dict[str, int] = Field(description="How many nodes (tasks) are in each state.")


class WorkflowPage(Given):
    workflows: list[WorkflowSummary]
    next: int | None = Field(description="Give it as `before` for the next page; null: there is none.")


class NodeErrorView(Given):
    code: str = Field(examples=["TASK_FAILED"])
    message: str = ""
    cause: str | None = None
    node: str | None = Field(default=None, description="The node that failed first, where this one failed with it.")
    job_id: int | None = None


class NodeView(Given):
    place: int
    parent: int | None = Field(description="The group or map that it is in; null: the workflow itself.")
    name: str
    kind: NodeKind
    state: str = Field(description="`waiting`, `paused`, `succeeded`, `failed`, `cancelled`, or its job's.")
    on_error: OnError
    task: str | None
    job_id: int | None
    item: int | None = Field(description="Of a member of a map, which one it is.")
    after: list[int] = Field(description="The places that it waits for, or waited for.")
    started_at: Instant | None
    finished_at: Instant | None
    error: NodeErrorView | None
    counts: dict[str, int] | None = Field(description="Of a group or map: its tasks by state.")


class FailedNode(Given):
    place: int
    name: str
    job_id: int | None
    error: NodeErrorView | None


class EdgeView(Given):
    source: int
    target: int


class WorkflowAction(Given):
    command: str
    why: str


class WorkflowView(WorkflowSummary):
    headline: str = Field(description="How it stands, in a sentence.")
    failed: list[FailedNode] = Field(description="Nodes that failed and may not fail, the first first.")
    nodes: list[NodeView] = Field(description="In order of dependency; what is inside follows what it is in.")
    edges: list[EdgeView] = Field(description="Members of maps share those of their map.")
    actions: list[WorkflowAction]


class WorkflowAnswer(Given):
    id: int
    answer: Literal["retried", "resumed", "cancelled"]
