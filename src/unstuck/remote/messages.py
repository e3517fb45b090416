"""Requests and responses of the worker protocol, with a limit on everything."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema

from unstuck.domain.journal import MAX_ENTRIES, MAX_NAME_CHARS
from unstuck.http.schemas import end_at_first_mistake, few_fields

MAX_BATCH = 1_000
"""Jobs in one call."""
MAX_CLAIM = 1_000
LONGEST_WAIT_S = 60.0
MAX_TASKS = 1_000
MAX_QUEUES = 200
MAX_HELD = 10_000
MAX_METADATA_BYTES = 16 * 1024
LARGEST = 2**63 - 1

WholeNumber = Annotated[int, Field(ge=1, le=LARGEST)]
DurationText = Annotated[float, Field(gt=0)] | Annotated[str, Field(max_length=50)]
Metadata = Annotated[
    dict[str, Any],
    Field(description="Anything that people should see of it; `hostname` and `version` are shown apart."),
]


class Body(BaseModel):
    """A body that a worker sends: an unknown field is a mistake, and so is a wrong item of a list, of which the first
    one is reported."""

    model_config = ConfigDict(extra="forbid")
    _few = model_validator(mode="before")(few_fields)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return end_at_first_mistake(handler(source))


class HeartbeatBody(BaseModel):
    worker_id: Annotated[str, Field(min_length=1, max_length=200, description="The worker's name, or its id.")]
    metadata: Annotated[Metadata | None, Field(description="Left out: as they were.")] = None


class RetryBody(Body):
    max_attempts: Annotated[int, Field(ge=1, le=10_000)] = 3
    backoff: Literal["exponential", "linear", "constant"] = "exponential"
    delay: DurationText = "1s"
    max_delay: DurationText = "10m"


class TaskBody(Body):
    """A task with its rules, as `@app.task(…)` takes them. They are stored with every job of it."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    queue: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    on_crash: Literal["fail", "retry"] = "fail"
    max_crash_retries: Annotated[int, Field(ge=0, le=1000)] = 3
    timeout: DurationText | None = None
    retry: RetryBody | Annotated[int, Field(ge=1, le=10_000)] | None = None
    heartbeat_timeout: DurationText | None = None
    overlap: Literal["bounded", "never"] = "bounded"
    hidden_args: Annotated[
        list[Annotated[int, Field(ge=0, le=1000)]],
        Field(max_length=100, description="Places of arguments that no door shows, counted from 0."),
    ] = []


class RegisterBody(Body):
    name: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    instance: Annotated[
        str | None,
        Field(
            max_length=200,
            description="Drawn by lot when the process starts: a registration repeated with it is the same worker.",
        ),
    ] = None
    replace: Annotated[
        bool,
        Field(description="Take the place of a living worker of this name: it is declared dead, its jobs are settled."),
    ] = False
    queues: Annotated[list[Annotated[str, Field(min_length=1, max_length=200)]], Field(max_length=MAX_QUEUES)] = []
    tasks: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=200)] | TaskBody], Field(max_length=MAX_TASKS)
    ] = []
    concurrency: Annotated[int, Field(ge=1, le=10_000)] = 1
    metadata: Metadata = {}
    heartbeat_interval: DurationText | None = None
    heartbeat_timeout: DurationText | None = None


class HeldBody(Body):
    job_id: WholeNumber
    token: WholeNumber


class BeatBody(Body):
    jobs: Annotated[list[HeldBody], Field(max_length=MAX_HELD)] = []
    metadata: Metadata | None = None


class ClaimBody(Body):
    limit: Annotated[int, Field(ge=1, le=MAX_CLAIM)] = 1
    wait: Annotated[float, Field(ge=0, le=LONGEST_WAIT_S, description="Seconds to wait for a job.")] = 0.0
    start: Annotated[bool, Field(description="Have the jobs running at once, without a call of `start`.")] = False
    have: Annotated[
        list[WholeNumber] | None,
        Field(
            max_length=MAX_HELD,
            description="Tokens that the worker knows it holds: what it holds besides is handed out again.",
        ),
    ] = None


class JobsBody(Body):
    jobs: Annotated[list[HeldBody], Field(min_length=1, max_length=MAX_BATCH)]


class ProgressItem(HeldBody):
    done: Annotated[float, Field(allow_inf_nan=False)] | None = None
    total: Annotated[float, Field(allow_inf_nan=False)] | None = None
    message: Annotated[str, Field(max_length=10_000)] = ""


class ProgressBody(Body):
    jobs: Annotated[list[ProgressItem], Field(min_length=1, max_length=MAX_BATCH)]


class ErrorBody(Body):
    type: str = "Error"
    message: str = ""
    traceback: str = ""


class StepItem(HeldBody):
    """Something that a job did on its way, and that must not be done again."""

    seq: Annotated[
        int,
        Field(ge=0, le=MAX_ENTRIES, description="Its place in the journal, from 1; 0 is the checkpoint, written over."),
    ]
    name: Annotated[str, Field(max_length=MAX_NAME_CHARS)] = "step"
    value: Annotated[Any, Field(description="What the step gave, or the checkpoint: any JSON.")] = None
    signal: Annotated[int | None, Field(ge=1, description="The number of a kept signal: this entry takes it.")] = None


class StepsBody(Body):
    jobs: Annotated[list[StepItem], Field(min_length=1, max_length=MAX_BATCH)]


class PauseBody(Body):
    """What an attempt with the outcome `suspended` waits for: `sleep`, or `signal` with or without a `timeout`."""

    seq: Annotated[int, Field(ge=1, le=MAX_ENTRIES, description="Its place in the journal.")]
    sleep: DurationText | None = None
    signal: Annotated[str | None, Field(min_length=1, max_length=MAX_NAME_CHARS)] = None
    timeout: DurationText | None = None


class SettleItem(HeldBody):
    outcome: Annotated[
        Literal["succeeded", "failed", "cancelled", "interrupted", "suspended"],
        Field(
            description="`cancelled`: it was asked for, and done. `interrupted`: the worker must go before it is done; "
            "the task's `on_crash` decides, and it counts for nobody. `suspended`: it waits, as `pause` says, and is "
            "handed out again then."
        ),
    ]
    pause: PauseBody | None = None
    result: Annotated[Any, Field(description="Any JSON.")] = None
    error: ErrorBody | None = None
    stdout: str = ""
    stderr: str = ""


class SettleBody(Body):
    jobs: Annotated[list[SettleItem], Field(min_length=1, max_length=MAX_BATCH)]


class TurnBody(Body):
    """Settle what was done, claim the next jobs and start them."""

    settle: Annotated[list[SettleItem], Field(max_length=MAX_BATCH, description="How jobs ended.")] = []
    claim: Annotated[int, Field(ge=0, le=MAX_CLAIM, description="Take at most this many jobs.")] = 0
    start: Annotated[bool, Field(description="Have the jobs running at once. False: only claimed.")] = True
    wait: Annotated[float, Field(ge=0, le=LONGEST_WAIT_S, description="Seconds to wait for a job.")] = 0.0
    have: Annotated[
        list[WholeNumber] | None,
        Field(
            max_length=MAX_HELD,
            description="Tokens that the worker knows it holds: what it holds besides is handed out again.",
        ),
    ] = None


class Cancel(BaseModel):
    job_id: int
    token: int


class Death(BaseModel):
    """Why the worker that asks is not the one it was."""

    id: str
    state: str
    at: str | None
    detector: str | None
    evidence: str | None
    detail: str


class Orders(BaseModel):
    id: str
    name: str
    state: str
    next_heartbeat_in: float
    drain: bool
    """Finish what runs, claim nothing, then shut down."""
    stop: bool
    """The same, soon."""
    disabled: bool
    """An operator switched it off: claims give nothing."""
    cancel: list[Cancel]


class HeartbeatResponse(Orders):
    success: Literal[True]
    message: str
    declared_dead: Death | None
    """Set in the first answer to a new incarnation: nothing that the old one held is its own any more."""


class Superseded(BaseModel):
    job_id: int
    token: int
    detail: str
    job: dict[str, Any] | None
    worker: dict[str, Any] | None


class BeatAnswerBody(Orders):
    lost: list[Superseded]
    """Of the jobs that it named: those that are no longer its own. It must stop working on them."""
    unknown: list[Cancel]
    """Jobs that it holds and did not name: a claim with `have` hands them out again."""


class Registered(Orders):
    heartbeat_interval_s: float
    heartbeat_timeout_s: float
    queues: list[str]
    tasks: list[str]


class JournalEntry(BaseModel):
    seq: int
    kind: Literal["step", "sleep", "wait", "signal", "timeout", "checkpoint"]
    name: str
    value: Any
    age_s: float
    """Since it was written."""


class KeptSignal(BaseModel):
    number: int
    name: str
    value: Any


class ClaimedJob(BaseModel):
    job_id: int
    token: int
    task: str
    queue: str
    state: Literal["claimed", "running"]
    attempt: int
    failures: int
    crashes: int
    payload: Any
    payload_type: str
    payload_base64: str | None
    on_crash: str
    timeout_s: float | None
    heartbeat_timeout_s: float
    journal: list[JournalEntry]
    """What earlier tries wrote down, in order: what is in it must not be done again."""
    signals: list[KeptSignal]
    """Sent to it, and not taken yet."""
    again: bool
    """It was handed out before, and the answer was lost."""


class ClaimAnswer(Orders):
    jobs: list[ClaimedJob]


class ItemResult(BaseModel):
    job_id: int
    token: int
    ok: bool
    status: str
    """What it is now, `already` where an earlier call did it, or why it was not done."""
    detail: str = ""
    job: dict[str, Any] | None = None
    worker: dict[str, Any] | None = None


class Results(BaseModel):
    id: str
    results: list[ItemResult]


class TurnTaken(ClaimAnswer):
    results: list[ItemResult]
    """How each job was settled, in the order in which they came."""


class Gone(BaseModel):
    id: str
    state: str
    released: int
    left_running: int
