"""Steps of a job's story: enqueued, claimed, progress, which rule was applied, who was notified."""

from typing import Any

from unstuck.client import views
from unstuck.client.why.autopsies import sentence
from unstuck.client.why.story import JobFacts, NumberedAttempt, Step, StepKind, far, worker_of
from unstuck.client.workflows.text import place_of
from unstuck.domain.autopsy import ProgressMark
from unstuck.domain.events import EventKind
from unstuck.domain.policy import is_readable
from unstuck.domain.states import FINAL_STATES, AttemptState, JobState
from unstuck.domain.units import in_words
from unstuck.errors import ErrorCode, exception_type
from unstuck.ledger.contract.jobs import Progress

AT_ONCE_S = 0.05
SCHEDULED_S = 0.5
"""A job due later than this after its enqueue was scheduled; less is the time that the enqueue took."""


def enqueued(job_facts: JobFacts) -> Step:
    job = job_facts.job
    who = f"{job.enqueued_by} enqueued it" if job.enqueued_by else "Somebody enqueued it"
    if job_facts.context.flow is not None and job_facts.context.place:
        # Nobody enqueues a node: whoever ended the last one that it waited for released it.
        who = f"As {place_of(job_facts.context.flow, job_facts.context.place)} it was released"
    parts = [f"{who} to queue {job.queue!r}"]
    if job.priority:
        parts.append(f"with priority {job.priority}")
    if job.unique_key is not None:
        parts.append(f"under the unique key {job.unique_key!r}")
    text = f"{' '.join(parts)}."
    facts: dict[str, Any] = {
        "by": job.enqueued_by,
        "queue": job.queue,
        "priority": job.priority,
        "unique_key": job.unique_key,
    }
    due = first_due(job_facts)
    if due is not None:
        text += f" It was scheduled to run {in_words(due - job.enqueued_at)} later."
        facts["run_at"] = views.instant(due)
    return Step(job.enqueued_at, StepKind.ENQUEUED, text, facts)


def first_due(job_facts: JobFacts) -> float | None:
    """Give when a scheduled job was first due; None where it was due at once, or where a retry has overwritten it."""
    job = job_facts.job
    moved = any(attempt.ended_at is not None and attempt.token != job.token for attempt in job_facts.attempts)
    retried = any(event.kind in ("retried", "retrying", "requeued") for event in job_facts.events)
    return job.run_at if not moved and not retried and job.run_at - job.enqueued_at > SCHEDULED_S else None


def taken(job_facts: JobFacts, one: NumberedAttempt) -> list[Step]:
    """Tell who claimed and started it, and how long it had waited by then."""
    attempt = one.attempt
    claimed = attempt.started_at if attempt.claimed_at is None else attempt.claimed_at
    if claimed is None:
        return []
    who, facts = worker_of(job_facts, one)
    ready = max(one.waited_from, first_due(job_facts) or 0.0) if one.number == 1 else one.waited_from
    waited_s = max(0.0, claimed - ready)
    facts |= {"try": one.number, "token": attempt.token, "waited_s": round(waited_s, 3)}
    after = f"after {in_words(waited_s)}" if waited_s > AT_ONCE_S else "at once"
    facts["claimed_at"] = views.instant(attempt.claimed_at)
    facts["started_at"] = views.instant(attempt.started_at)
    if attempt.started_at is None:
        text = f"Try {one.number}: {who} claimed it {after}; its code has not begun."
        return [Step(claimed, StepKind.CLAIMED, text, facts)]
    held_s = attempt.started_at - claimed
    if held_s <= AT_ONCE_S:
        text = f"Try {one.number}: {who} claimed and started it {after}."
    else:
        text = f"Try {one.number}: {who} claimed it {after} and started it {in_words(held_s)} later."
    return [Step(claimed, StepKind.STARTED, text, facts)]


def progressed(job_facts: JobFacts, one: NumberedAttempt) -> list[Step]:
    """Tell how far it said it was: a running try from the ledger, a dead one from its autopsy."""
    attempt = one.attempt
    mark: ProgressMark | Progress | None = None
    known = job_facts.progress if job_facts.progress and job_facts.progress.token == attempt.token else None
    if attempt.state is AttemptState.RUNNING:
        mark = known
    elif attempt.autopsy is not None:
        # The ledger may know it too, if nobody could ask its worker any more.
        mark = attempt.autopsy.progress or known
    if mark is None or mark.at is None:
        return []
    # The clock of its host may differ from the ledger's: what it said while it ran stays within its run.
    at = max(mark.at, attempt.started_at or mark.at)
    at = at if attempt.ended_at is None else min(at, attempt.ended_at)
    facts: dict[str, Any] = {"try": one.number, "done": mark.done, "total": mark.total, "message": mark.message}
    how_far = far(mark)
    text = f"Its last word on its progress: {how_far}." if how_far else "Its last sign of life."
    return [Step(at, StepKind.PROGRESS, text, facts)]


def decided(job_facts: JobFacts, one: NumberedAttempt) -> list[Step]:
    """Tell the rule; a success needs none."""
    attempt = one.attempt
    if attempt.ended_at is None or attempt.state in (AttemptState.SUCCEEDED, AttemptState.SUSPENDED):
        return []
    autopsy = attempt.autopsy
    # Where somebody's cancel won over a retry, the autopsy still has the rule of the retry.
    written = autopsy.rule if autopsy is not None and attempt.state is not AttemptState.CANCELLED else ""
    rule = written or derived_rule(job_facts, one)
    text = f"Rule: {rule}."
    facts = {"try": one.number, "rule": rule, "derived": not written, "final": one.closes}
    if not is_readable(job_facts.job.policy):
        text += " Its stored rules cannot be read by this version, so the careful default stands in for them."
        facts["policy_readable"] = False
    return [Step(attempt.ended_at, StepKind.DECIDED, text, facts)]


def derived_rule(job_facts: JobFacts, one: NumberedAttempt) -> str:
    """Say by policy and counters which rule was applied, where nobody wrote it down."""
    policy = job_facts.policy
    match one.attempt.state:
        case AttemptState.CANCELLED:
            return "somebody asked to cancel it: it is not tried again"
        case AttemptState.DRAINED:
            again = "it is not tried again" if one.closes else "it is tried again at once"
            return f'on_crash="{policy.on_crash}": a shutdown counts for nobody, and {again}'
        case AttemptState.CRASHED if one.attempt.code == ErrorCode.CRASHED_TOO_OFTEN:
            return f'on_crash="retry" with max_crash_retries={policy.max_crash_retries}: death {one.crashes} ends it'
        case AttemptState.CRASHED if one.closes:
            return f'on_crash="{policy.on_crash}": its effects may have happened, so it is not tried again'
        case AttemptState.CRASHED:
            return f'on_crash="{policy.on_crash}": it is tried again{_after(job_facts, one)}'
        case _:
            return _after_failure(job_facts, one)


def _after_failure(job_facts: JobFacts, one: NumberedAttempt) -> str:
    limit = job_facts.policy.retry.max_attempts
    if one.attempt.code == ErrorCode.RESULT_NOT_STORABLE:
        return "what cannot be stored now cannot be stored the next time: it is not tried again"
    if not one.closes:
        # The policy of a job that an operator moved by hand may say otherwise; what happened is what counts.
        return f"retry: failure {one.failures} of {max(limit, one.failures + 1)}; tried again{_after(job_facts, one)}"
    if limit == 1:
        return "the task has no retry: one failure ends it"
    return f"retry: failure {one.failures} of {limit} was the last one"


def _after(job_facts: JobFacts, one: NumberedAttempt) -> str:
    """Say how long it waits for the next try, where that is still known."""
    job = job_facts.job
    ended = [attempt.token for attempt in job_facts.attempts if attempt.ended_at is not None]
    if one.attempt.ended_at is None or ended[-1:] != [one.attempt.token]:
        return " after its backoff"
    wait_s = job.run_at - one.attempt.ended_at
    return f" in {in_words(wait_s)}" if wait_s > 0 and job.state is not JobState.CANCELLED else " at once"


def told(job_facts: JobFacts, one: NumberedAttempt) -> list[Step]:
    """Tell who learns of the end of the job; nobody does of a try that is followed by another."""
    attempt = one.attempt
    if not one.closes or attempt.ended_at is None:
        return []
    if attempt.state is AttemptState.SUCCEEDED:
        error = job_facts.job.error
        return [_told(attempt.ended_at, None if error is None else error.code)]
    return [_told(attempt.ended_at, attempt.code or "")]


def told_unrun(job_facts: JobFacts, tries: list[NumberedAttempt]) -> list[Step]:
    """Tell it of a job that ended without a try: cancelled while it waited."""
    job = job_facts.job
    if (
        job.state not in FINAL_STATES
        or job.finished_at is None
        or (tries and tries[-1].closes and job.token is not None)
    ):
        return []
    steps = []
    if job.error is not None and not any(
        event.kind in (EventKind.CANCELLED, EventKind.EXPIRED) for event in job_facts.events
    ):
        # A purge writes one event for the whole queue, and the cause with each job.
        cause = job.error.cause or job.error.shown
        text = f"It ended without a try: {sentence(cause)}"
        steps.append(Step(job.finished_at, StepKind.CANCELLED, text, {"code": job.error.code, "cause": cause}))
    return [*steps, _told(job.finished_at, job.error.code if job.error is not None else "")]


def told_workflow(job_facts: JobFacts) -> list[Step]:
    """Tell who learns of the end of a workflow, of the job that stands for it."""
    job = job_facts.job
    if job.state not in FINAL_STATES or job.finished_at is None:
        return []
    code = job.error.code if job.error is not None else None if job.state is JobState.SUCCEEDED else ""
    return [_told(job.finished_at, code)]


def _told(at: float, code: str | None) -> Step:
    if code is None:
        text = "Whoever waits with `job.result()` gets what it returned."
        return Step(at, StepKind.NOTIFIED, text, {"exception": None})
    name = exception_type(code).__name__
    text = f"Whoever waits with `job.result()` gets {name}."
    return Step(at, StepKind.NOTIFIED, text, {"exception": name, "code": code})
