"""Request and response models of the API. Fields are only added, never removed.

Answers have the fields of the command line's JSON; they are only added to."""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import (
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    StrictFloat,
    StrictInt,
    StrictStr,
    model_validator,
)
from pydantic_core import CoreSchema

from unstuck.client.enqueue import MAX_PRIORITY, MAX_UNIQUE_KEY_CHARS
from unstuck.domain import text, workflows
from unstuck.domain.journal import MAX_NAME_CHARS as MAX_STEP_NAME_CHARS
from unstuck.domain.limits import MAX_CONCURRENCY_LIMIT
from unstuck.domain.states import AttemptState, JobState
from unstuck.domain.text import MAX_NAME_CHARS
from unstuck.domain.workflows import MAX_NODES, NodeKind, OnError, WorkflowState

DURATION = "A duration like `30s`, `5m`, `1h30m`, or a number of seconds."

Span = Annotated[StrictStr | StrictFloat | StrictInt, Field(description=DURATION, examples=["10m", 30])]
Instant = Annotated[datetime, Field(description="ISO 8601, in UTC.")]
Anything = Annotated[Any, Field(description="Any JSON value.")]


MAX_FIELDS = 100
"""No body has as many: complaining of each of 100,000 would take as much memory as all the rest of the request."""


def few_fields(cls: type[BaseModel], value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_FIELDS:
        raise ValueError(f"it has {len(value):,} fields; {len(cls.model_fields)} are known")
    return value


def end_at_first_mistake(schema: CoreSchema) -> CoreSchema:
    """Have every list in a schema read up to its first wrong item: to complain of 250,000 of them took 400 MB."""
    _end_lists(schema)
    return schema


def _end_lists(part: Any) -> None:
    if isinstance(part, dict):
        if part.get("type") == "list":
            part["fail_fast"] = True
        for inner in part.values():
            _end_lists(inner)
    elif isinstance(part, list | tuple):
        for inner in part:
            _end_lists(inner)


class RequestModel(BaseModel):
    """A body of a request: an unknown field is a mistake, and so is a wrong item of a list, of which the first one is
    reported."""

    model_config = ConfigDict(extra="forbid")

    _few = model_validator(mode="before")(few_fields)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return end_at_first_mistake(handler(source))


class ResponseModel(BaseModel):
    """A body that goes out. It is written by the views that all doors share; this says what is in it."""


MAX_BATCH = 1_000
JOB_EXAMPLE: dict[str, Any] = {"task": "add", "args": [1, 2]}


class NewJobBody(RequestModel):
    model_config = ConfigDict(json_schema_extra={"examples": [JOB_EXAMPLE]})

    task: str = Field(min_length=1, max_length=MAX_NAME_CHARS, description="A task that some worker has.")
    args: list[Any] = Field(default=[], description="Arguments by place.")
    kwargs: dict[str, Any] = Field(default={}, description="Arguments by name.")
    queue: str | None = Field(default=None, description="Instead of the task's own.")
    priority: StrictInt = Field(default=0, ge=-MAX_PRIORITY, le=MAX_PRIORITY, description="Higher goes first.")
    delay: Span | None = Field(default=None, description="Run it so much later: `5m`, or seconds.")
    run_at: AwareDatetime | StrictFloat | StrictInt | None = Field(
        default=None,
        description="Run it then: ISO 8601 with a time zone, or seconds since 1970. Not together with `delay`.",
    )
    unique_key: str | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_UNIQUE_KEY_CHARS,
        description="At most one unfinished job has it: where there is one, it is given back, and `fresh` is false.",
    )
    unique: Span = Field(
        default="unfinished",
        description="What the key is good for: while its job is `pending`, or `unfinished`; or for a time, `10m`.",
    )
    on_duplicate: Literal["return", "replace", "refuse"] = Field(
        default="return",
        description="Where a job has the key: `return` it, `replace` (cancel) it while it is pending, `refuse` (409).",
    )
    concurrency_key: str | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_UNIQUE_KEY_CHARS,
        description="Jobs with the same key stand in one line, across all workers. Default: the task's.",
    )
    concurrency_limit: StrictInt | None = Field(
        default=None, ge=1, le=MAX_CONCURRENCY_LIMIT, description="So many of one key are at work at once."
    )
    expires: Span | None = Field(
        default=None, description="Not begun so long after it was due it is cancelled as `EXPIRED`."
    )
    keep: Span | None = Field(default=None, description="It is kept for so long after its end.")


class NewJobsBody(RequestModel):
    jobs: list[NewJobBody] = Field(min_length=1, max_length=MAX_BATCH)


class JobStored(ResponseModel):
    id: int
    task: str
    queue: str
    fresh: bool = Field(description="False: an unfinished job with the same `unique_key` was there already.")
    warning: str | None = Field(description="Says that no living worker would take it now; it stays queued.")


class JobsStored(ResponseModel):
    jobs: list[JobStored] = Field(description="In the order in which they came.")


class ErrorView(ResponseModel):
    code: str = Field(examples=["TASK_FAILED"])
    type: str | None = Field(description="The type of the exception that the code of the task raised.")
    message: str
    cause: str | None
    details: dict[str, Any]


class JobSummary(ResponseModel):
    id: int
    task: str
    queue: str
    state: JobState
    priority: int
    error: ErrorView | None
    crash_count: int
    failures: int
    attempt: int = Field(description="How many tries a worker claimed so far.")
    worker: str | None = Field(description="In whose hands it is.")
    unique_key: str | None
    cancel_requested: bool
    enqueued_at: Instant
    enqueued_by: str | None
    run_at: Instant
    claimed_at: Instant | None
    started_at: Instant | None
    finished_at: Instant | None
    awaits: str | None = Field(description="The signal that it waits for.")


class RetryView(ResponseModel):
    max_attempts: int
    backoff: Literal["exponential", "linear", "constant"]
    delay_s: float
    max_delay_s: float


class PolicyView(ResponseModel):
    """The rules of the job, as its task had them when it was enqueued."""

    retry: RetryView
    on_crash: Literal["fail", "retry"]
    max_crash_retries: int
    timeout_s: float | None
    heartbeat: bool
    heartbeat_interval_s: float | None
    heartbeat_timeout_s: float | None
    overlap: Literal["bounded", "never"]
    stall_timeout_s: float | None
    interpreter_timeout_s: float | None
    memory_limit_bytes: int | None
    hidden_args: list[int] = Field(description="Places of arguments that are not shown.")
    hidden_args_from: int | None = Field(description="From this place on none is shown.")


class ProgressView(ResponseModel):
    at: Instant
    done: float | None
    total: float | None
    message: str
    busy_since: Instant | None = Field(description="Since when no Python code ran in its process.")


Autopsy = Annotated[
    dict[str, Any], Field(description="Why its process died: `kind`, `summary`, `detector`, and what else is known.")
]


class AttemptView(ResponseModel):
    token: int
    worker: str
    worker_name: str | None
    state: AttemptState
    claimed_at: Instant | None
    started_at: Instant | None
    ended_at: Instant | None
    code: str | None
    cause: str | None
    last_heartbeat_at: Instant | None
    heartbeat_deadline: Instant | None
    deadline: Instant | None
    autopsy: Autopsy | None


class EventView(ResponseModel):
    id: int
    at: Instant
    kind: str
    job_id: int | None
    worker: str | None
    message: str


class OutputView(ResponseModel):
    token: int = Field(description="Of the attempt that printed it.")
    stdout: str
    stderr: str


class EntryView(ResponseModel):
    """A step that is done, a sleep, a signal that was taken, or the last checkpoint."""

    seq: int
    kind: Literal["step", "sleep", "wait", "signal", "timeout", "checkpoint"]
    name: str
    value: Anything
    at: Instant
    token: int = Field(description="Of the attempt that wrote it.")


class SignalView(ResponseModel):
    number: int
    name: str
    value: Anything
    at: Instant
    by: str
    taken_seq: int | None = Field(description="The entry by which the job took it; null while it is kept.")


class SignalBody(RequestModel):
    name: str = Field(min_length=1, max_length=MAX_STEP_NAME_CHARS, description="What the job waits for.")
    value: Any = Field(default=None, description="What comes with it: any JSON.")


class SignalAnswer(ResponseModel):
    id: int
    name: str
    answer: Literal["woken", "kept"] = Field(description="`woken`: it waited for this. `kept`: until it does.")


class WorkflowOf(ResponseModel):
    """The workflow that a job belongs to."""

    id: int
    name: str
    state: WorkflowState
    node: str | None = Field(description="Null where the job stands for the whole workflow.")
    place: int
    after: list[str] = Field(description="Names of the nodes that it waited for.")


class JobDetail(JobSummary):
    args: Anything = Field(description="Without the values of what is called like a secret (`•••`).")
    kwargs: Anything = Field(description="Without the values of what is called like a secret (`•••`).")
    result: Anything
    waiting: str | None = Field(description="Why it does not move, and what to do about it.")
    progress: ProgressView | None
    workflow: WorkflowOf | None = Field(description="The workflow that it is a node of, or stands for.")
    policy: PolicyView
    attempts: list[AttemptView]
    events: list[EventView]
    journal: list[EntryView] = Field(description="What it wrote down on its way; its checkpoint is the entry 0.")
    signals: list[SignalView] = Field(description="What it was sent, oldest first.")


class JobResult(ResponseModel):
    """How a job ended. `error` is null if it succeeded and its result is there."""

    id: int
    state: Literal[JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.QUARANTINED]
    result: Anything
    error: ErrorView | None


class JobUnfinished(ResponseModel):
    """It has not ended; what it is doing instead."""

    id: int
    state: Literal[JobState.PENDING, JobState.CLAIMED, JobState.RUNNING, JobState.WAITING]
    doing: str
    progress: ProgressView | None


class JobPage(ResponseModel):
    jobs: list[JobSummary] = Field(description="Newest first.")
    next: int | None = Field(description="Give it as `before` to look further; null: this was all.")


class StoryStep(ResponseModel):
    at: Instant
    kind: str
    text: str
    facts: dict[str, Any]


class StoryAction(ResponseModel):
    command: str
    why: str


class StoryView(ResponseModel):
    job: JobSummary
    told_at: Instant
    headline: str
    story: list[StoryStep]
    next: str
    actions: list[StoryAction]


WORKFLOW_EXAMPLE: dict[str, Any] = {
    "name": "sums",
    "nodes": [
        {"name": "first", "task": "add", "args": [1, 2]},
        {"name": "second", "task": "add", "args": [{"$node": "first"}, 4]},
    ],
}

NodeName = Annotated[str, Field(min_length=1, max_length=workflows.MAX_NAME_CHARS)]


class NewNodeBody(RequestModel):
    """A call of a task; with `map` one call for each item of another node's result; with `nodes` a group."""

    name: NodeName | None = Field(default=None, description="Else it is called as its task.")
    task: str | None = Field(
        default=None, min_length=1, max_length=text.MAX_NAME_CHARS, description="A task that some worker has."
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


class NewWorkflowBody(RequestModel):
    model_config = ConfigDict(json_schema_extra={"examples": [WORKFLOW_EXAMPLE]})

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


class WorkflowStored(ResponseModel):
    id: int = Field(description="Also the number of the job that stands for it: its result is that of the workflow.")
    name: str
    fresh: bool = Field(description="False: an unfinished workflow with the same `unique_key` was there already.")
    warning: str | None = Field(description="Says that no living worker would take some node now; it stays queued.")


class WorkflowSummary(ResponseModel):
    id: int
    name: str
    state: WorkflowState
    created_at: Instant
    finished_at: Instant | None
    counts: dict[str, int] = Field(description="How many nodes (tasks) are in each state.")


class WorkflowPage(ResponseModel):
    workflows: list[WorkflowSummary]
    next: int | None = Field(description="Give it as `before` for the next page; null: there is none.")


class NodeErrorView(ResponseModel):
    code: str = Field(examples=["TASK_FAILED"])
    message: str = ""
    cause: str | None = None
    node: str | None = Field(default=None, description="The node that failed first, where this one failed with it.")
    job_id: int | None = None


class NodeView(ResponseModel):
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


class FailedNode(ResponseModel):
    place: int
    name: str
    job_id: int | None
    error: NodeErrorView | None


class EdgeView(ResponseModel):
    source: int
    target: int


class WorkflowAction(ResponseModel):
    command: str
    why: str


class WorkflowView(WorkflowSummary):
    headline: str = Field(description="How it stands, in a sentence.")
    failed: list[FailedNode] = Field(description="Nodes that failed and may not fail, the first first.")
    nodes: list[NodeView] = Field(description="In order of dependency; what is inside follows what it is in.")
    edges: list[EdgeView] = Field(description="Members of maps share those of their map.")
    actions: list[WorkflowAction]


class WorkflowAnswer(ResponseModel):
    id: int
    answer: Literal["retried", "resumed", "cancelled"]
