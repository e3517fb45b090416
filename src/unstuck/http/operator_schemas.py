"""Request and response models for operators and schedules."""

from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictInt, model_validator

from unstuck.client.operator.workers import MAX_REASON_CHARS
from unstuck.domain.limits import MAX_CONCURRENCY, MAX_CONCURRENCY_LIMIT, MAX_KEY_CHARS
from unstuck.domain.states import JobState
from unstuck.http.schemas import Instant, PolicyView, RequestModel, ResponseModel, Span

MAX_BULK = 10_000
DEFAULT_BULK = 1_000

JobNumbers = Annotated[list[StrictInt], Field(min_length=1, max_length=MAX_BULK)]


class Where(RequestModel):
    """Which jobs; at least one condition."""

    state: list[JobState] = Field(default=[], description="Of these states.")
    queue: str | None = None
    task: str | None = None
    error: str | None = Field(default=None, examples=["WORKER_CRASHED"])
    older_than: Span | None = Field(default=None, description="Enqueued longer ago than this.")
    newer_than: Span | None = Field(default=None, description="Enqueued within this time.")
    worker: str | None = Field(default=None, description="In the hands of this worker (id or name).")

    @model_validator(mode="after")
    def _some(self) -> "Where":
        if not self.model_dump(exclude_defaults=True):
            raise ValueError("give at least one condition")
        return self


class BulkBody(RequestModel):
    """Either the numbers of jobs, or what they have in common."""

    ids: JobNumbers | None = None
    where: Where | None = None
    limit: StrictInt = Field(
        default=DEFAULT_BULK, ge=1, le=MAX_BULK, description="Of those that match, at most so many."
    )
    dry_run: StrictBool = Field(default=False, description="Only say which it would be.")

    @model_validator(mode="after")
    def _one_of(self) -> "BulkBody":
        if (self.ids is None) == (self.where is None):
            raise ValueError("give ids or where, one of the two")
        return self


class BulkAnswerOne(ResponseModel):
    id: int
    answer: str = Field(description="What became of it; in a dry run `matched`.", examples=["queued"])


class BulkAnswer(ResponseModel):
    dry_run: bool
    matched: int = Field(description="How many jobs this was about.")
    more: bool = Field(description="More match than `limit`: ask again.")
    counts: dict[str, int] = Field(description="How many got which answer.")
    answers: list[BulkAnswerOne]


class JobAnswer(ResponseModel):
    id: int
    answer: str


class LimitView(ResponseModel):
    queue: str
    concurrency: int | None = Field(description="So many of its jobs are in hand at once, across all workers.")
    rate: str | None = Field(description="So many are begun in a time.", examples=["100/m"])
    limited_by: str | None = Field(description="The operator who chose it; null: its app declared it.")
    held: int
    room: int | None = Field(description="So many may be taken now; null: there is no limit.")
    next_in_s: float | None = Field(description="When the rate allows the next, where that is what is missing.")


class LimitBody(RequestModel):
    """The limit of a queue; both null: no limit, whatever its app says. `as_declared`: as its app says again."""

    concurrency: StrictInt | None = Field(default=None, ge=1, le=MAX_CONCURRENCY)
    rate: str | None = Field(default=None, max_length=50, examples=["100/m"])
    as_declared: StrictBool = False


class HolderView(ResponseModel):
    job_id: int
    state: str
    queue: str


class LineView(ResponseModel):
    key: str
    limit: int = Field(description="So many of its jobs are at work at once.")
    limited_by: str | None = Field(description="The operator who chose it; null: what was enqueued last says it.")
    blocked: int = Field(description="How many wait to be let in.")
    holders: list[HolderView]


class LineLimitBody(RequestModel):
    key: str = Field(min_length=1, max_length=MAX_KEY_CHARS)
    limit: StrictInt | None = Field(ge=1, le=MAX_CONCURRENCY_LIMIT, description="null: as its jobs say again.")


class QueueView(ResponseModel):
    name: str
    paused: bool
    pending: int = Field(description="Ready to run now.")
    scheduled: int
    claimed: int
    running: int
    oldest_pending_s: float | None
    workers: int = Field(description="Living workers that serve it.")
    waiting: int = Field(description="Jobs that gave their slots back, and wait for a time or a signal.")
    blocked: int = Field(description="Pending jobs whose concurrency key has no free place.")
    limit: LimitView | None


class Paused(ResponseModel):
    paused: list[str] = Field(description="The queues that were not paused before.")


class Resumed(ResponseModel):
    resumed: list[str] = Field(description="The queues that were paused before.")


class Purged(ResponseModel):
    queue: str
    cancelled: int


class StaleBody(RequestModel):
    older_than: Span | None = Field(
        default=None, description="Of workers silent for at least so long. Left out: each job's own timeout."
    )


class StaleView(ResponseModel):
    job_id: int
    task: str
    queue: str
    state: JobState
    on_crash: str
    worker: str
    worker_name: str
    worker_state: str
    host: str
    silent_s: float
    held_s: float
    given_up_after_s: float | None = Field(description="Null: its hard deadline alone decides.")
    action: Literal["none", "failed", "requeued", "cancelled", "quarantined"]


class ReasonBody(RequestModel):
    reason: str = Field(default="an operator switched it off", max_length=MAX_REASON_CHARS)


class WorkerAsked(ResponseModel):
    id: str
    name: str
    request: Literal["drain", "stop"]


class SwitchedOff(ResponseModel):
    workers: list[str]
    host: str | None
    disabled: Literal[True]
    unserved: list[str] = Field(description="Queues that nobody serves now.")


class DisabledView(ResponseModel):
    reason: str
    by: str
    at: Instant
    auto: bool
    of_host: bool


class SwitchedOn(ResponseModel):
    workers: list[str]
    host: str | None
    changed: bool
    disabled: DisabledView | None = Field(description="It is still off, for this reason.")


class VictimView(ResponseModel):
    token: int
    at: Instant | None
    worker: str
    worker_name: str | None
    host: str | None
    kind: str | None
    cause: str


class QuarantinedView(ResponseModel):
    id: int
    task: str
    queue: str
    crash_count: int
    enqueued_at: Instant
    quarantined_at: Instant | None
    cause: str | None
    victims: list[VictimView]


class FindingView(ResponseModel):
    code: str
    severity: Literal["problem", "warning", "info"]
    what: str
    why: str
    cure: str
    facts: dict[str, Any]


class PruneBody(RequestModel):
    older_than: Span | None = Field(default=None, description="That ended longer ago. Left out: the retention of jobs.")
    state: list[Literal["succeeded", "failed", "cancelled", "quarantined"]] = Field(
        default=[], description="Left out: all."
    )


class Pruned(ResponseModel):
    pruned: int


class TaskView(ResponseModel):
    name: str
    queue: str
    is_async: bool
    policy: PolicyView


class ScheduleView(ResponseModel):
    name: str
    task: str
    queue: str
    priority: int
    args: Any
    kwargs: Any
    cron: str | None
    every_s: float | None
    tz: str
    when: str = Field(examples=["*/5 * * * * (Europe/Berlin)"])
    catch_up: Literal["skip", "latest", "all"]
    source: Literal["app", "operator"] = Field(description="`app`: it stands in code. `operator`: it was made here.")
    paused: bool
    paused_by: str | None
    next_at: Instant | None = Field(description="Null where it is paused or just begun.")
    last_at: Instant | None = Field(description="Its last tick.")
    fired_at: Instant | None = Field(description="When that was really enqueued.")
    last_job_id: int | None
    changed_at: Instant
    workers: int = Field(description="Living workers that would fire it.")


class ScheduleBody(RequestModel):
    """Exactly one of `cron` and `every`."""

    task: str = Field(description="As workers know it.")
    cron: str | None = Field(default=None, examples=["*/5 * * * *"])
    every: Span | None = Field(default=None, examples=["30s"])
    tz: str = "UTC"
    catch_up: Literal["skip", "latest", "all"] = "latest"
    args: list[Any] = Field(default=[])
    kwargs: dict[str, Any] = Field(default={})
    queue: str | None = None
    priority: StrictInt = Field(default=0, ge=-1000, le=1000)
    unique_key: str | None = None


class SchedulePaused(ResponseModel):
    name: str
    paused: bool
    changed: bool


class ScheduleRun(ResponseModel):
    name: str
    job_id: int


class ScheduleRemoved(ResponseModel):
    name: str
    removed: Literal[True]
    workers: int = Field(description="Living workers with it in their code: it comes back with the next that starts.")
