"""Say which rule decided what became of a job after a try, and who was told."""

from unstuck.client.why.endings import sentence
from unstuck.client.why.gathering import Evidence, Try
from unstuck.client.why.story import Step, StepKind
from unstuck.domain.durations import in_words
from unstuck.domain.errors import ErrorCode, exception_type
from unstuck.domain.events import EventKind
from unstuck.domain.policy import is_readable
from unstuck.domain.states import FINAL, AttemptState, JobState


def decided(evidence: Evidence, one: Try) -> list[Step]:
    """Tell the rule; a success needs none."""
    attempt = one.attempt
    if attempt.ended_at is None or attempt.state in (AttemptState.SUCCEEDED, AttemptState.SUSPENDED):
        return []
    autopsy = attempt.autopsy
    # Where somebody's cancel won over a retry, the autopsy still has the rule of the retry.
    written = autopsy.rule if autopsy is not None and attempt.state is not AttemptState.CANCELLED else ""
    rule = written or derived_rule(evidence, one)
    text = f"Rule: {rule}."
    facts = {"try": one.number, "rule": rule, "derived": not written, "final": one.closes}
    if not is_readable(evidence.job.policy):
        text += " Its stored rules cannot be read by this version, so the careful default stands in for them."
        facts["policy_readable"] = False
    return [Step(attempt.ended_at, StepKind.DECIDED, text, facts)]


def derived_rule(evidence: Evidence, one: Try) -> str:
    """Say by policy and counters which rule was applied, where nobody wrote it down."""
    policy = evidence.policy
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
            return f'on_crash="{policy.on_crash}": it is tried again{_after(evidence, one)}'
        case _:
            return _after_failure(evidence, one)


def _after_failure(evidence: Evidence, one: Try) -> str:
    limit = evidence.policy.retry.max_attempts
    if one.attempt.code == ErrorCode.RESULT_NOT_STORABLE:
        return "what cannot be stored now cannot be stored the next time: it is not tried again"
    if not one.closes:
        # The policy of a job that an operator moved by hand may say otherwise; what happened is what counts.
        return f"retry: failure {one.failures} of {max(limit, one.failures + 1)}; tried again{_after(evidence, one)}"
    if limit == 1:
        return "the task has no retry: one failure ends it"
    return f"retry: failure {one.failures} of {limit} was the last one"


def _after(evidence: Evidence, one: Try) -> str:
    """Say how long it waits for the next try, where that is still known."""
    job = evidence.job
    ended = [attempt.token for attempt in evidence.attempts if attempt.ended_at is not None]
    if one.attempt.ended_at is None or ended[-1:] != [one.attempt.token]:
        return " after its backoff"
    wait_s = job.run_at - one.attempt.ended_at
    return f" in {in_words(wait_s)}" if wait_s > 0 and job.state is not JobState.CANCELLED else " at once"


def told(evidence: Evidence, one: Try) -> list[Step]:
    """Tell who learns of the end of the job; nobody does of a try that is followed by another."""
    attempt = one.attempt
    if not one.closes or attempt.ended_at is None:
        return []
    if attempt.state is AttemptState.SUCCEEDED:
        error = evidence.job.error
        return [_told(attempt.ended_at, None if error is None else error.code)]
    return [_told(attempt.ended_at, attempt.code or "")]


def told_unrun(evidence: Evidence, tries: list[Try]) -> list[Step]:
    """Tell it of a job that ended without a try: cancelled while it waited."""
    job = evidence.job
    if job.state not in FINAL or job.finished_at is None or (tries and tries[-1].closes and job.token is not None):
        return []
    steps = []
    if job.error is not None and not any(
        event.kind in (EventKind.CANCELLED, EventKind.EXPIRED) for event in evidence.events
    ):
        # A purge writes one event for the whole queue, and the cause with each job.
        cause = job.error.cause or job.error.shown
        text = f"It ended without a try: {sentence(cause)}"
        steps.append(Step(job.finished_at, StepKind.CANCELLED, text, {"code": job.error.code, "cause": cause}))
    return [*steps, _told(job.finished_at, job.error.code if job.error is not None else "")]


def told_workflow(evidence: Evidence) -> list[Step]:
    """Tell who learns of the end of a workflow, of the job that stands for it."""
    job = evidence.job
    if job.state not in FINAL or job.finished_at is None:
        return []
    code = job.error.code if job.error is not None else None if job.state is JobState.SUCCEEDED else ""
    return [_told(job.finished_at, code)]


def _told(at: float, code: str | None) -> Step:
    if code is None:
        text = "Whoever waits with `job.result()` gets what it returned."
        return Step(at, StepKind.TOLD, text, {"exception": None})
    name = exception_type(code).__name__
    text = f"Whoever waits with `job.result()` gets {name}."
    return Step(at, StepKind.TOLD, text, {"exception": name, "code": code})
