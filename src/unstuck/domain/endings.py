"""Conclude what an attempt came to, and describe the one write that ends it, fenced by its token."""

from typing import Any, Literal, assert_never

import msgspec

from unstuck.domain.autopsy import MAX_STACK_CHARS, Autopsy
from unstuck.domain.policy import Policy
from unstuck.domain.retry import PAIR_EXCUSED_S, REPEATED_CRASH_S, crash_delay_s, excused_delay_s, retry_delay_s
from unstuck.domain.states import AttemptState, JobState
from unstuck.domain.units import brief
from unstuck.domain.worker_health import IN_A_ROW
from unstuck.errors import RESULT_NOT_AVAILABLE, WORKER_DIED, ErrorCode, type_in_cause

CountsAs = Literal["none", "failure", "crash", "suspicion", "company"]
"""The counter that an ended attempt adds to. If several jobs were there and the culprit is not known, no crash is
counted: `suspicion` for jobs in the process that died, which run alone next; `company` if the whole worker was lost, or
if the worker is presumed to be at fault."""


class JobError(msgspec.Struct, frozen=True):
    """Why a job is not all right: kept with the job, shown at every door."""

    code: str
    message: str
    cause: str | None = None
    details: dict[str, Any] = {}

    @property
    def type(self) -> str | None:
        """The type of the exception that user code raised, if it did."""
        found = self.details.get("type")
        if isinstance(found, str) and found:
            return found
        return type_in_cause(self.cause, self.message) if self.code == ErrorCode.TASK_FAILED else None

    @property
    def shown(self) -> str:
        """The message with the type of the exception, as people read it."""
        return ": ".join(part for part in (self.type, self.message) if part)

    def __str__(self) -> str:
        return f"{self.code}: {self.shown}"


NO_ERROR_STORED = "its row stores no error: it was edited by hand, or restored in part"
_MISSING = {
    JobState.FAILED: JobError(ErrorCode.WORKER_CRASHED.value, WORKER_DIED, NO_ERROR_STORED),
    JobState.CANCELLED: JobError(ErrorCode.CANCELLED.value, "Job was cancelled", NO_ERROR_STORED),
    JobState.QUARANTINED: JobError(ErrorCode.CRASHED_TOO_OFTEN.value, "Job is quarantined", NO_ERROR_STORED),
}


_NO_RESULT = JobError(
    RESULT_NOT_AVAILABLE,
    "Its result is not there any more",
    "its row stores no result: it was edited by hand, or restored in part",
)


def missing_error(state: JobState, *, has_result: bool) -> JobError | None:
    """Return the error that a final state means if none is stored; None for all other states.

    A success always stores a result, if only `null`. PostgreSQL has the same in its function `node_error`."""
    if state is JobState.SUCCEEDED and not has_result:
        return _NO_RESULT
    return _MISSING.get(state)


class Ending(msgspec.Struct, frozen=True):
    """End attempt `token` of `job_id` and move the job to `state`."""

    job_id: int
    token: int
    state: JobState
    """PENDING (tried again after `delay_s`), WAITING (goes on after `delay_s`, or with a signal) or a final state."""
    attempt: AttemptState
    error: JobError | None = None
    result: bytes | None = None
    delay_s: float = 0.0
    counter: CountsAs = "none"
    event: str | None = None
    """The kind of the event to write with it; None for what is not worth one."""
    message: str = ""
    """The event's sentence."""
    awaits_signal: str | None = None
    """The signal that it waits for."""
    wakes: bool = True
    """False for one that waits for a signal however long it takes, and not for `delay_s`."""
    autopsy: Autopsy | None = None
    """Why its process died or was ended; None where user code ended by itself."""


class Release(msgspec.Struct, frozen=True):
    """Give back a job whose user code never ran: no attempt is spent."""

    job_id: int
    token: int
    event: str | None = None
    message: str = ""


class Succeeded(msgspec.Struct, frozen=True):
    result: bytes


class Raised(msgspec.Struct, frozen=True):
    """User code raised."""

    type: str
    message: str
    traceback: str


class NotStorable(msgspec.Struct, frozen=True):
    """User code returned something that cannot be written."""

    reason: str


class Died(msgspec.Struct, frozen=True):
    """The process that ran it is gone, or must be taken for gone."""

    cause: str
    code: ErrorCode = ErrorCode.WORKER_CRASHED
    counts: bool = True
    """False for a drain, a deploy or a lease that we gave up ourselves: those spend no counter."""
    drained: bool = False
    shared: Literal["process", "worker"] | None = None
    """What died with it had other jobs too, and who of them killed it is not known."""
    in_a_row: int = 0
    """How many different jobs died on its worker since one ended otherwise there, this one included. 0 if a job that
    runs beside them speaks for the worker."""
    died_here: int = 0
    """How often this job died among them before."""
    autopsy: Autopsy | None = None


class Overran(msgspec.Struct, frozen=True):
    """The hard deadline passed."""

    cause: str
    autopsy: Autopsy | None = None


class Stalled(msgspec.Struct, frozen=True):
    """It gave no sign for longer than its task allows: none of its logic, or none of Python at all."""

    cause: str
    autopsy: Autopsy | None = None


class Cancelled(msgspec.Struct, frozen=True):
    cause: str
    autopsy: Autopsy | None = None


class Suspended(msgspec.Struct, frozen=True):
    """It gave its slot back in the middle of its work."""

    delay_s: float | None = None
    """It goes on after so long; None: with a signal alone."""
    awaits_signal: str | None = None
    """The signal that it waits for; None where it only sleeps."""


Outcome = Succeeded | Raised | NotStorable | Died | Overran | Stalled | Cancelled | Suspended


MAX_MESSAGE_CHARS = 10_000
MAX_TRACEBACK_CHARS = 50_000
MAX_SUSPICIONS = 3
"""So many deaths in company are free; after that each counts, though nobody knows who did it."""
MAX_EXCUSES = 24
"""Number of deaths that are not charged to a job on workers under which everything dies. With their waits that takes
about 20 hours; a job that kills every worker it meets must be found in the end."""


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
    suspected_crashes: int = 0
    """Tries that died in a process with other jobs, so far: who killed it is not known."""


def conclude(attempt: Attempt, outcome: Outcome) -> Ending:
    """Give the ending that policy asks for."""
    match outcome:
        case Succeeded():
            return _final(attempt, JobState.SUCCEEDED, AttemptState.SUCCEEDED, result=outcome.result)
        case Raised():
            details = {
                "type": storable_text(outcome.type, 500),
                "traceback": storable_text(outcome.traceback, MAX_TRACEBACK_CHARS),
            }
            error = JobError(ErrorCode.TASK_FAILED, storable_text(outcome.message, MAX_MESSAGE_CHARS), None, details)
            # What is kept of an attempt, and what others are told, is the cause: it names the exception.
            return _after_failure(attempt, msgspec.structs.replace(error, cause=error.shown))
        case Overran():
            error = JobError(
                ErrorCode.DEADLINE_EXCEEDED,
                "Job ran past its deadline",
                storable_text(outcome.cause, MAX_MESSAGE_CHARS),
            )
            return _after_failure(attempt, error, outcome.autopsy)
        case Stalled():
            error = JobError(
                ErrorCode.STALLED, "Job gave no sign of life", storable_text(outcome.cause, MAX_MESSAGE_CHARS)
            )
            return _after_failure(attempt, error, outcome.autopsy)
        case NotStorable():
            error = JobError(
                ErrorCode.RESULT_NOT_STORABLE,
                "Result cannot be stored",
                storable_text(outcome.reason, MAX_MESSAGE_CHARS),
            )
            return _final(attempt, JobState.FAILED, AttemptState.FAILED, error)
        case Died():
            return _after_death(attempt, outcome)
        case Cancelled():
            return _cancelled(attempt, outcome.cause, outcome.autopsy)
        case Suspended():
            return _suspended(attempt, outcome)
        case _:
            assert_never(outcome)


def _suspended(attempt: Attempt, pause: Suspended) -> Ending:
    if attempt.cancel_requested:
        return _cancelled(attempt, "cancelled by request while it ran")
    signal = pause.awaits_signal
    message = f"Waits for signal {signal!r}" if signal is not None else "Sleeps"
    if pause.delay_s is not None:
        message += f" for {'at most ' if signal is not None else ''}{brief(pause.delay_s)}"
    return Ending(
        attempt.job_id,
        attempt.token,
        JobState.WAITING,
        AttemptState.SUSPENDED,
        delay_s=pause.delay_s or 0.0,
        event="suspended",
        message=message,
        awaits_signal=signal,
        wakes=pause.delay_s is not None,
    )


def _after_failure(attempt: Attempt, error: JobError, autopsy: Autopsy | None = None) -> Ending:
    failures = attempt.failures + 1
    retry = attempt.policy.retry
    if attempt.cancel_requested:
        return _cancelled(attempt, "cancelled by request while it ran", autopsy)
    if failures >= retry.max_attempts:
        rule = f"retry: failure {failures} of {retry.max_attempts} was the last one"
        return _final(
            attempt, JobState.FAILED, AttemptState.FAILED, error, counter="failure", autopsy=_ruled(autopsy, rule)
        )
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
        message=f"Try {failures} of {retry.max_attempts} failed; next in {delay_s:.1f}s: {_brief(error)}"[:500],
        autopsy=_ruled(autopsy, f"retry: failure {failures} of {retry.max_attempts}; tried again in {brief(delay_s)}"),
    )


def _after_death(attempt: Attempt, death: Died) -> Ending:
    state = AttemptState.DRAINED if death.drained else AttemptState.CRASHED
    error = JobError(death.code, WORKER_DIED, storable_text(death.cause, MAX_MESSAGE_CHARS))
    if attempt.cancel_requested:
        return _cancelled(attempt, f"cancelled by request; its process died ({death.cause})", death.autopsy)
    counter = counter_of(attempt, death)
    policy = attempt.policy
    if policy.on_crash == "fail":
        rule = 'on_crash="fail": its effects may have happened, so it is not tried again'
        return _final(attempt, JobState.FAILED, state, error, counter=counter, autopsy=_ruled(death.autopsy, rule))
    crashes = attempt.crashes + (counter == "crash")
    if counter == "crash" and crashes > policy.max_crash_retries:
        quarantine = JobError(
            ErrorCode.CRASHED_TOO_OFTEN,
            f"Job killed its process {crashes} times and is quarantined",
            error.cause,
        )
        rule = f'on_crash="retry" with max_crash_retries={policy.max_crash_retries}: death {crashes} ends it'
        return _final(
            attempt, JobState.QUARANTINED, state, quarantine, counter=counter, autopsy=_ruled(death.autopsy, rule)
        )
    delay_s = _delay_after_death_s(attempt, death, counter, crashes)
    return Ending(
        attempt.job_id,
        attempt.token,
        JobState.PENDING,
        state,
        error=error,
        delay_s=delay_s,
        counter=counter,
        event="requeued",
        message=f"Task re-queued: {error.cause}"[:500],
        autopsy=_ruled(death.autopsy, _rule_of_requeue(attempt, death, counter, crashes, delay_s)),
    )


def counter_of(attempt: Attempt, death: Died) -> CountsAs:
    """Return what a death adds to. A drain counts for nobody. A death that others shared counts only as a suspicion,
    and so does one on a worker under which everything dies, beyond the first crash of the job. But not for ever: a job
    that takes whole workers with it must be found too."""
    if death.drained or not death.counts:
        return "none"
    if death.shared is not None and attempt.suspected_crashes < MAX_SUSPICIONS:
        return "suspicion" if death.shared == "process" else "company"
    return "company" if _excuses_left(attempt, death) > 0 else "crash"


def _excuses_left(attempt: Attempt, death: Died) -> int:
    """Return how many deaths, this one included, may still be blamed on the worker instead of the job.

    The first crash always counts against the job. If two different jobs die in turn on a worker, up to MAX_SUSPICIONS
    deaths are excused. If three or more do, up to MAX_EXCUSES, until a job ends otherwise there."""
    if not attempt.crashes:
        return 0
    if death.in_a_row >= IN_A_ROW:
        return MAX_EXCUSES - attempt.suspected_crashes
    return MAX_SUSPICIONS - attempt.suspected_crashes if death.in_a_row > 1 and death.died_here else 0


def _is_excused(attempt: Attempt, death: Died, counter: CountsAs) -> bool:
    return counter == "company" and (death.shared is None or attempt.suspected_crashes >= MAX_SUSPICIONS)


def _delay_after_death_s(attempt: Attempt, death: Died, counter: CountsAs, crashes: int) -> float:
    """Return the wait before the next try. A job waits for longer if it died on that worker before: without that, it
    would be first in its queue again, and no other job could show whether the worker is well."""
    if counter == "none":
        return 0.0
    if _is_excused(attempt, death, counter):
        return excused_delay_s(attempt.suspected_crashes) if death.in_a_row >= IN_A_ROW else PAIR_EXCUSED_S
    return max(crash_delay_s(max(crashes, 1)), REPEATED_CRASH_S if death.died_here else 0.0)


def _rule_of_requeue(attempt: Attempt, death: Died, counter: CountsAs, crashes: int, delay_s: float) -> str:
    limit = attempt.policy.max_crash_retries
    match counter:
        case "company" if _is_excused(attempt, death, counter):
            excuses = attempt.suspected_crashes + _excuses_left(attempt, death)
            return (
                f"the last {death.in_a_row} different jobs on its worker all died, so this crash is the worker's: it "
                f"counts as no crash of the job ({attempt.suspected_crashes + 1} of {excuses} such); tried again in "
                f"{brief(delay_s)}"
            )
        case "suspicion" | "company":
            what, then = ("process", ", and the job runs alone next") if counter == "suspicion" else ("worker", "")
            return (
                f"several jobs were in the {what} and who killed it is not known: it counts as no crash "
                f"({attempt.suspected_crashes + 1} of {MAX_SUSPICIONS} such){then}"
            )
        case "crash":
            return f'on_crash="retry": crash {crashes} of {limit} allowed; tried again in {brief(delay_s)}'
        case _:
            return 'on_crash="retry": it was not the job\'s doing and counts for nobody; tried again at once'


def _ruled(autopsy: Autopsy | None, rule: str) -> Autopsy | None:
    return None if autopsy is None else msgspec.structs.replace(storable(autopsy), rule=rule)


def storable(autopsy: Autopsy) -> Autopsy:
    """Make every text of a dead process storable: what it said last must not keep its death from being written."""
    progress = autopsy.progress
    if progress is not None:
        progress = msgspec.structs.replace(progress, message=storable_text(progress.message, MAX_MESSAGE_CHARS))
    return msgspec.structs.replace(
        autopsy,
        progress=progress,
        summary=storable_text(autopsy.summary, MAX_MESSAGE_CHARS),
        doubt=storable_text(autopsy.doubt, MAX_MESSAGE_CHARS),
        stack=storable_text(autopsy.stack, MAX_STACK_CHARS),
        stdout=storable_text(autopsy.stdout, MAX_MESSAGE_CHARS),
        stderr=storable_text(autopsy.stderr, MAX_MESSAGE_CHARS),
    )


def _brief(error: JobError) -> str:
    if error.cause is None or error.cause == error.shown:
        return error.shown
    return f"{error.message}: {error.cause}"


def _cancelled(attempt: Attempt, cause: str, autopsy: Autopsy | None = None) -> Ending:
    error = JobError(ErrorCode.CANCELLED, "Job was cancelled", storable_text(cause, MAX_MESSAGE_CHARS))
    rule = "somebody asked to cancel it: it is not tried again"
    return _final(attempt, JobState.CANCELLED, AttemptState.CANCELLED, error, autopsy=_ruled(autopsy, rule))


def _final(
    attempt: Attempt,
    state: JobState,
    ended: AttemptState,
    error: JobError | None = None,
    *,
    result: bytes | None = None,
    counter: CountsAs = "none",
    autopsy: Autopsy | None = None,
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
        autopsy=autopsy,
    )


def storable_text(text: str, limit: int) -> str:
    """Make any text storable everywhere: no NUL, no lone surrogates, bounded."""
    if len(text) > limit:
        text = f"{text[: limit // 2]}\n… {len(text) - limit} characters left out …\n{text[-limit // 2 :]}"
    return text.replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode("utf-8")
