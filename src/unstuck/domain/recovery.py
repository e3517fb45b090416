"""Decide what a job becomes when an attempt at it ends: the crash policy and the retry policy."""

from typing import assert_never

import msgspec

from unstuck.domain.endings import Counter, Ending, JobError
from unstuck.domain.errors import WORKER_DIED, ErrorCode
from unstuck.domain.outcomes import Cancelled, Died, NotStorable, Outcome, Overran, Raised, Succeeded
from unstuck.domain.policy import Policy
from unstuck.domain.retry import crash_delay_s, retry_delay_s
from unstuck.domain.states import AttemptState, JobState

MAX_MESSAGE_CHARS = 10_000
MAX_TRACEBACK_CHARS = 50_000


class Attempt(msgspec.Struct, frozen=True):
    """What the rules need to know of a held job."""

    job_id: int
    token: int
    policy: Policy
    failures: int
    """Tries that ended by an error of user code, so far."""
    crashes: int
    """Tries that ended by a death, so far."""
    cancel_requested: bool = False


def conclude(attempt: Attempt, outcome: Outcome) -> Ending:
    """Give the ending that policy asks for."""
    match outcome:
        case Succeeded():
            return _final(attempt, JobState.SUCCEEDED, AttemptState.SUCCEEDED, result=outcome.result)
        case Raised():
            details = {
                "type": printable(outcome.type, 500),
                "traceback": printable(outcome.traceback, MAX_TRACEBACK_CHARS),
            }
            error = JobError(ErrorCode.TASK_FAILED, printable(outcome.message, MAX_MESSAGE_CHARS), None, details)
            return _after_failure(attempt, error)
        case Overran():
            error = JobError(ErrorCode.DEADLINE_EXCEEDED, "Job ran past its deadline", outcome.cause)
            return _after_failure(attempt, error)
        case NotStorable():
            error = JobError(
                ErrorCode.RESULT_NOT_STORABLE,
                "Result cannot be stored",
                printable(outcome.reason, MAX_MESSAGE_CHARS),
            )
            return _final(attempt, JobState.FAILED, AttemptState.FAILED, error)
        case Died():
            return _after_death(attempt, outcome)
        case Cancelled():
            return _cancelled(attempt, outcome.cause)
        case _:
            assert_never(outcome)


def _after_failure(attempt: Attempt, error: JobError) -> Ending:
    failures = attempt.failures + 1
    retry = attempt.policy.retry
    if attempt.cancel_requested:
        return _cancelled(attempt, "cancelled by request while it ran")
    if failures >= retry.max_attempts:
        return _final(attempt, JobState.FAILED, AttemptState.FAILED, error, counter="failure")
    delay_s = retry_delay_s(retry, failures)
    return Ending(
        attempt.job_id,
        attempt.token,
        JobState.PENDING,
        AttemptState.FAILED,
        error=error,
        delay_s=delay_s,
        counter="failure",
        event="retrying",
        message=f"Try {failures} of {retry.max_attempts} failed; next in {delay_s:.1f}s: {error.message}"[:500],
    )


def _after_death(attempt: Attempt, death: Died) -> Ending:
    state = AttemptState.DRAINED if death.drained else AttemptState.CRASHED
    error = JobError(death.code, WORKER_DIED, printable(death.cause, MAX_MESSAGE_CHARS))
    # A drain counts for nobody, whoever reports it.
    counts = death.counts and not death.drained
    counter: Counter = "crash" if counts else "none"
    if attempt.cancel_requested:
        return _cancelled(attempt, f"cancelled by request; its process died ({death.cause})")
    if attempt.policy.on_crash == "fail":
        return _final(attempt, JobState.FAILED, state, error, counter=counter)
    crashes = attempt.crashes + 1 if counts else attempt.crashes
    if counts and crashes > attempt.policy.max_crash_retries:
        quarantine = JobError(
            ErrorCode.CRASHED_TOO_OFTEN,
            f"Job killed its process {crashes} times and is quarantined",
            error.cause,
        )
        return _final(attempt, JobState.QUARANTINED, state, quarantine, counter=counter)
    return Ending(
        attempt.job_id,
        attempt.token,
        JobState.PENDING,
        state,
        error=error,
        delay_s=crash_delay_s(crashes) if counts else 0.0,
        counter=counter,
        event="requeued",
        message=f"Task re-queued: {error.cause}"[:500],
    )


def _cancelled(attempt: Attempt, cause: str) -> Ending:
    error = JobError(ErrorCode.CANCELLED, "Job was cancelled", printable(cause, MAX_MESSAGE_CHARS))
    return _final(attempt, JobState.CANCELLED, AttemptState.CANCELLED, error)


def _final(
    attempt: Attempt,
    state: JobState,
    ended: AttemptState,
    error: JobError | None = None,
    *,
    result: bytes | None = None,
    counter: Counter = "none",
) -> Ending:
    return Ending(
        attempt.job_id,
        attempt.token,
        state,
        ended,
        error=error,
        result=result,
        counter=counter,
        event=None if state is JobState.SUCCEEDED else state.value,
        message="" if error is None else f"{error.code}: {error.cause or error.message}"[:500],
    )


def printable(text: str, limit: int) -> str:
    """Make any text storable everywhere: no NUL, no lone surrogates, bounded."""
    if len(text) > limit:
        text = f"{text[: limit // 2]}\n… {len(text) - limit} characters left out …\n{text[-limit // 2 :]}"
    return text.replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode("utf-8")
