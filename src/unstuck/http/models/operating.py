"""What operators ask for, and what they are told was done."""

from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictInt, model_validator

from unstuck.client.operator import MAX_REASON_CHARS
from unstuck.domain.limits import MAX_CONCURRENCY
from unstuck.domain.order import MAX_KEY_CHARS, MAX_PLACES_IN_LINE
from unstuck.domain.states import JobState
from unstuck.http.models.base import Asked, Given, Instant, Span
from unstuck.http.models.jobs import PolicyView

MAX_BULK = 10_000
DEFAULT_BULK = 1_000

JobNumbers = Annotated[list[StrictInt], Field(min_length=1, max_length=MAX_BULK)]


class Where(Asked):
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


class BulkBody(Asked):
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


class ReleaseBody(Asked):
    """The numbers of quarantined jobs, or all of a task, or all."""

    ids: JobNumbers | None = None
    task: str | None = None
    all: StrictBool = False
    limit: StrictInt = Field(
        default=DEFAULT_BULK, ge=1, le=MAX_BULK, description="Of those that match, at most so many."
    )
    dry_run: StrictBool = Field(default=False, description="Only say which it would be.")

    @model_validator(mode="after")
    def _one_of(self) -> "ReleaseBody":
        if sum((self.ids is not None, self.task is not None, self.all)) != 1:
            raise ValueError("give ids, task or all, one of the three")
        return self


class BulkAnswerOne(Given):
    id: int
    answer: str = Field(description="What became of it; in a dry run `matched`.", examples=["queued"])


class BulkAnswer(Given):
    dry_run: bool
    matched: int = Field(description="How many jobs this was about.")
    more: bool = Field(description="More match than `limit`: ask again.")
    counts: dict[str, int] = Field(description="How many got which answer.")
    answers: list[BulkAnswerOne]


class JobAnswer(Given):
    id: int
    answer: str


class LimitView(Given):
    queue: str
    concurrency: int | None = Field(description="So many of its jobs are in hand at once, across all workers.")
    rate: str | None = Field(description="So many are begun in a time.", examples=["100/m"])
    limited_by: str | None = Field(description="The operator who chose it; null: its app declared it.")
    held: int
    room: int | None = Field(description="So many may be taken now; null: there is no limit.")
    next_in_s: float | None = Field(description="When the rate allows the next, where that is what is missing.")


class LimitBody(Asked):
    """The limit of a queue; both null: no limit, whatever its app says. `as_declared`: as its app says again."""

    concurrency: StrictInt | None = Field(default=None, ge=1, le=MAX_CONCURRENCY)
    rate: str | None = Field(default=None, max_length=50, examples=["100/m"])
    as_declared: StrictBool = False


class HolderView(Given):
    job_id: int
    state: str
    queue: str


class LineView(Given):
    key: str
    limit: int = Field(description="So many of its jobs are at work at once.")
    limited_by: str | None = Field(description="The operator who chose it; null: what was enqueued last says it.")
    blocked: int = Field(description="How many wait to be let in.")
    holders: list[HolderView]


class LineLimitBody(Asked):
    key: str = Field(min_length=1, max_length=MAX_KEY_CHARS)
    limit: StrictInt | None = Field(ge=1, le=MAX_PLACES_IN_LINE, description="null: as its jobs say again.")


class QueueView(Given):
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


class Paused(Given):
    paused: list[str] = Field(description="The queues that were not paused before.")


class Resumed(Given):
    resumed: list[str] = Field(description="The queues that were paused before.")


class Purged(Given):
    queue: str
    cancelled: int


class StaleBody(Asked):
    older_than: Span | None = Field(
        default=None, description="Of workers silent for at least so long. Left out: each job's own timeout."
    )


class StaleView(Given):
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


class ReasonBody(Asked):
    reason: str = Field(default="an operator switched it off", max_length=MAX_REASON_CHARS)


class WorkerAsked(Given):
    id: str
    name: str
    request: Literal["drain", "stop"]


class SwitchedOff(Given):
    workers: list[str]
    host: str | None
    disabled: Literal[True]
    unserved: list[str] = Field(description="Queues that nobody serves now.")


class DisabledView(Given):
    reason: str
    by: str
    at: Instant
    auto: bool
    of_host: bool


class SwitchedOn(Given):
    workers: list[str]
    host: str | None
    changed: bool
    disabled: DisabledView | None = Field(description="It is still off, for this reason.")


class VictimView(Given):
    token: int
    at: Instant | None
    worker: str
    worker_name: str | None
    host: str | None
    kind: str | None
    cause: str


class QuarantinedView(Given):
    id: int
    task: str
    queue: str
    crash_count: int
    enqueued_at: Instant
    quarantined_at: Instant | None
    cause: str | None
    victims: list[VictimView]


class FindingView(Given):
    code: str
    severity: Literal["problem", "warning", "info"]
    what: str
    why: str
    cure: str
    facts: dict[str, Any]


class PruneBody(Asked):
    older_than: Span | None = Field(default=None, description="That ended longer ago. Left out: the retention of jobs.")
    state: list[Literal["succeeded", "failed", "cancelled", "quarantined"]] = Field(
        default=[], description="Left out: all."
    )


class Pruned(Given):
    pruned: int


class TaskView(Given):
    name: str
    queue: str
    is_async: bool
    policy: PolicyView


class OverviewView(Given):
    version: str
    ledger: dict[str, Any]
    jobs: dict[str, int] = Field(description="Unfinished jobs by state, as in `queues`.")
    workers: dict[str, int] = Field(description="Workers by state.")
    queues: list[QueueView]
