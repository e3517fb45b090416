"""Jobs as they come in, and as they are shown."""

from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, ConfigDict, Field, StrictFloat, StrictInt

from unstuck.client.enqueueing import MAX_PRIORITY, MAX_UNIQUE_KEY_CHARS
from unstuck.domain.journal import MAX_NAME_CHARS as MAX_STEP_NAME_CHARS
from unstuck.domain.names import MAX_NAME_CHARS
from unstuck.domain.order import MAX_PLACES_IN_LINE
from unstuck.domain.states import AttemptState, JobState
from unstuck.domain.workflow import WorkflowState
from unstuck.http.models.base import Anything, Asked, Given, Instant, Span

MAX_BATCH = 1_000
EXAMPLE: dict[str, Any] = {"task": "add", "args": [1, 2]}


class NewJobBody(Asked):
    model_config = ConfigDict(json_schema_extra={"examples": [EXAMPLE]})

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
        default=None, ge=1, le=MAX_PLACES_IN_LINE, description="So many of one key are at work at once."
    )
    expires: Span | None = Field(
        default=None, description="Not begun so long after it was due it is cancelled as `EXPIRED`."
    )
    keep: Span | None = Field(default=None, description="It is kept for so long after its end.")


class NewJobsBody(Asked):
    jobs: list[NewJobBody] = Field(min_length=1, max_length=MAX_BATCH)


class JobStored(Given):
    id: int
    task: str
    queue: str
    fresh: bool = Field(description="False: an unfinished job with the same `unique_key` was there already.")
    warning: str | None = Field(description="Says that no living worker would take it now; it stays queued.")


class JobsStored(Given):
    jobs: list[JobStored] = Field(description="In the order in which they came.")


class ErrorView(Given):
    code: str = Field(examples=["TASK_FAILED"])
    type: str | None = Field(description="The type of the exception that the code of the task raised.")
    message: str
    cause: str | None
    details: dict[str, Any]


class JobSummary(Given):
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


class RetryView(Given):
    max_attempts: int
    backoff: Literal["exponential", "linear", "constant"]
    delay_s: float
    max_delay_s: float


class PolicyView(Given):
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


class ProgressView(Given):
    at: Instant
    done: float | None
    total: float | None
    message: str
    busy_since: Instant | None = Field(description="Since when no Python code ran in its process.")


Autopsy = Annotated[
    dict[str, Any], Field(description="Why its process died: `kind`, `summary`, `detector`, and what else is known.")
]


class AttemptView(Given):
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


class EventView(Given):
    id: int
    at: Instant
    kind: str
    job_id: int | None
    worker: str | None
    message: str


class OutputView(Given):
    token: int = Field(description="Of the attempt that printed it.")
    stdout: str
    stderr: str


class EntryView(Given):
    """A step that is done, a sleep, a signal that was taken, or the last checkpoint."""

    seq: int
    kind: Literal["step", "sleep", "wait", "signal", "timeout", "checkpoint"]
    name: str
    value: Anything
    at: Instant
    token: int = Field(description="Of the attempt that wrote it.")


class SignalView(Given):
    number: int
    name: str
    value: Anything
    at: Instant
    by: str
    taken_seq: int | None = Field(description="The entry by which the job took it; null while it is kept.")


class SignalBody(Asked):
    name: str = Field(min_length=1, max_length=MAX_STEP_NAME_CHARS, description="What the job waits for.")
    value: Any = Field(default=None, description="What comes with it: any JSON.")


class SignalAnswer(Given):
    id: int
    name: str
    answer: Literal["woken", "kept"] = Field(description="`woken`: it waited for this. `kept`: until it does.")


class WorkflowOf(Given):
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


class JobResult(Given):
    """How a job ended. `error` is null if it succeeded and its result is there."""

    id: int
    state: Literal[JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.QUARANTINED]
    result: Anything
    error: ErrorView | None


class JobUnfinished(Given):
    """It has not ended; what it is doing instead."""

    id: int
    state: Literal[JobState.PENDING, JobState.CLAIMED, JobState.RUNNING, JobState.WAITING]
    doing: str
    progress: ProgressView | None


class JobPage(Given):
    jobs: list[JobSummary] = Field(description="Newest first.")
    next: int | None = Field(description="Give it as `before` to look further; null: this was all.")


class StoryStep(Given):
    at: Instant
    kind: str
    text: str
    facts: dict[str, Any]


class StoryAction(Given):
    command: str
    why: str


class StoryView(Given):
    job: JobSummary
    told_at: Instant
    headline: str
    story: list[StoryStep]
    next: str
    actions: list[StoryAction]
