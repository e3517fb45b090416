"""The story of one job as facts, for the CLI, the dashboard and alerts; and how the facts are gathered."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import msgspec

from unstuck.client import views
from unstuck.client.reasons import JobContext
from unstuck.domain.autopsy import ProgressMark
from unstuck.domain.bounds import SHOWN_BYTES
from unstuck.domain.endings import JobError
from unstuck.domain.policy import Policy, decode_policy
from unstuck.domain.states import FINAL_STATES, AttemptState
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.events import EventRecord
from unstuck.ledger.contract.jobs import AttemptRecord, JobRecord, JournalRecord, OutputRecord, Progress
from unstuck.ledger.contract.workers import WorkerRecord


class StepKind(StrEnum):
    """What a step of the story tells of, as one word for machines."""

    ENQUEUED = "enqueued"
    CLAIMED = "claimed"
    """In the hands of a worker, not started yet."""
    STARTED = "started"
    PROGRESS = "progress"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    """User code raised, or what it returned cannot be stored."""
    DIED = "died"
    """The process of the attempt died, or was lost."""
    ENDED = "ended"
    """We ended the attempt: deadline, stall, memory limit, lease."""
    DRAINED = "drained"
    CANCELLED = "cancelled"
    DECIDED = "decided"
    """Which rule was applied, and why."""
    NOTIFIED = "told"
    """Who was told how it ended."""
    SUSPENDED = "suspended"
    """It gave its slot back, and waited for a time or a signal."""
    STEP = "step"
    """It wrote something down: a step, a sleep, a signal, its checkpoint."""
    OPERATOR = "operator"
    """Somebody did something by hand."""
    EVENT = "event"
    """Any other event of the job."""
    OMITTED = "left_out"


class Quote(msgspec.Struct, frozen=True):
    """Something to show as it was written: a stack, the last lines of an output."""

    title: str
    text: str


class Step(msgspec.Struct, frozen=True):
    """One thing that happened."""

    at: float
    """Seconds since 1970."""
    kind: StepKind
    text: str
    """Whole sentences for people."""
    facts: dict[str, Any] = {}
    """The same for machines, and more; what is not known is left out."""
    quotes: tuple[Quote, ...] = ()
    """Long texts that belong to it; all of them are in `facts` too."""


class Action(msgspec.Struct, frozen=True):
    """What an operator can do now."""

    command: str
    why: str


class Story(msgspec.Struct, frozen=True):
    """All that is known of a job, in order of time."""

    job: JobRecord
    told_at: float
    headline: str
    steps: tuple[Step, ...]
    next: str
    actions: tuple[Action, ...]


def story_view(story: Story) -> views.View:
    """Give a story as plain values; the fields are a contract: they are only added to."""
    return {
        "job": views.job_summary(story.job),
        "told_at": views.instant(story.told_at),
        "headline": story.headline,
        "story": [
            {"at": views.instant(step.at), "kind": step.kind.value, "text": step.text, "facts": step.facts}
            for step in story.steps
        ],
        "next": story.next,
        "actions": [{"command": action.command, "why": action.why} for action in story.actions],
    }


MAX_EVENTS = 500
"""The newest; a job with more has been through the same many times."""
RETRIED = "retried"
"""The kind of the event that an operator's retry writes."""


class JobFacts(msgspec.Struct, frozen=True):
    """All that a story is made of, at one instant."""

    job: JobRecord
    attempts: Sequence[AttemptRecord]
    events: Sequence[EventRecord]
    outputs: Sequence[OutputRecord]
    progress: Progress | None
    context: JobContext
    journal: Sequence[JournalRecord] = ()

    @property
    def policy(self) -> Policy:
        return decode_policy(self.job.policy)

    def worker(self, worker_id: str | None) -> WorkerRecord | None:
        """Give a worker; None where retention has removed it."""
        return next((worker for worker in self.context.workers if worker.id == worker_id), None)

    def error_of(self, attempt: AttemptRecord) -> JobError | None:
        """Give the whole error of a try where it is still known: the job keeps the last one only."""
        ended = [one.token for one in self.attempts if one.ended_at is not None]
        error = self.job.error
        return error if error is not None and ended[-1:] == [attempt.token] and error.code == attempt.code else None

    def output(self, token: int) -> OutputRecord | None:
        return next((output for output in self.outputs if output.token == token), None)


def gather(ledger: Ledger, job: JobRecord, context: JobContext) -> JobFacts:
    return JobFacts(
        job,
        ledger.jobs.attempts(job.id),
        ledger.events.list(job_id=job.id, limit=MAX_EVENTS),
        ledger.jobs.outputs(job.id),
        ledger.jobs.progress([job.id]).get(job.id),
        context,
        ledger.jobs.journal(job.id, SHOWN_BYTES),
    )


class NumberedAttempt(msgspec.Struct, frozen=True):
    """One attempt with its place among the others."""

    number: int
    attempt: AttemptRecord
    waited_from: float
    """Since when it could have been claimed, as far as that is known."""
    failures: int
    """Tries that user code failed, this one included, since the counters were last fresh."""
    crashes: int
    """Deaths, this one included, since the counters were last fresh; suspicions are among them."""
    closes: bool
    """The job ended with it: it is the last, or an operator queued the job again after it."""


def number_attempts(job_facts: JobFacts) -> list[NumberedAttempt]:
    """Number the attempts and count as the rules did; a retry by hand starts the counters afresh."""
    retried = [event.at for event in job_facts.events if event.kind == RETRIED]
    found: list[NumberedAttempt] = []
    failures = crashes = 0
    since = job_facts.job.enqueued_at
    for at, attempt in enumerate(job_facts.attempts):
        began = _began(attempt, since)
        again = [moment for moment in retried if since <= moment <= began]
        if again:
            failures = crashes = 0
            since = again[-1]
        failures += attempt.state is AttemptState.FAILED
        crashes += attempt.state is AttemptState.CRASHED
        ended = attempt.ended_at
        following = job_facts.attempts[at + 1] if at + 1 < len(job_facts.attempts) else None
        until = job_facts.context.now_s if following is None else _began(following, job_facts.context.now_s)
        closes = ended is not None and (
            any(ended <= moment <= until for moment in retried)
            # A job that ended keeps the token of the try that ended it.
            or (job_facts.job.state in FINAL_STATES and attempt.token == job_facts.job.token)
        )
        found.append(NumberedAttempt(at + 1, attempt, since, failures, crashes, closes))
        since = since if ended is None else ended
    return found


def _began(attempt: AttemptRecord, otherwise: float) -> float:
    moments = (attempt.claimed_at, attempt.started_at)
    return min((moment for moment in moments if moment is not None), default=otherwise)


def worker_of(job_facts: JobFacts, one: NumberedAttempt) -> tuple[str, dict[str, Any]]:
    """Name the worker of a try in words and in facts, also where retention has removed it."""
    worker = job_facts.worker(one.attempt.worker_id)
    facts: dict[str, Any] = {"worker": one.attempt.worker_id}
    if worker is not None:
        facts |= {"worker_name": worker.name, "host": worker.host}
        return f"worker {worker.name} ({worker.id}) on {worker.host}", facts
    host = one.attempt.autopsy.host if one.attempt.autopsy is not None else None
    if host is not None:
        facts["host"] = host
    return f"worker {one.attempt.worker_id}{f' on {host}' if host else ''} (no longer in the ledger)", facts


def far(mark: ProgressMark | Progress) -> str:
    """Write how far a job said it was: `3 of 10 (30%), "third page"`; empty where it only gave a sign."""
    parts = []
    if mark.done is not None and mark.total:
        parts.append(f"{mark.done:,g} of {mark.total:,g} ({100 * mark.done / mark.total:.0f}%)")
    elif mark.done is not None:
        parts.append(f"{mark.done:,g} done")
    if mark.message:
        parts.append(f'"{mark.message}"')
    return ", ".join(parts)
