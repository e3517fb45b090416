"""Describe the one write that ends an attempt: fenced by its token, whoever makes it."""

from typing import Any, Literal

import msgspec

from unstuck.domain.autopsy import Autopsy
from unstuck.domain.errors import RESULT_NOT_AVAILABLE, WORKER_DIED, ErrorCode, type_in_cause
from unstuck.domain.states import AttemptState, JobState

Counter = Literal["none", "failure", "crash", "suspicion", "company"]
"""What an ended attempt adds to. Where others were there and the culprit is not known: `suspicion` for those in the
process that died, which must run alone next; `company` for those whose whole worker was lost."""


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
    counter: Counter = "none"
    event: str | None = None
    """The kind of the event to write with it; None for what is not worth one."""
    message: str = ""
    """The event's sentence."""
    awaits: str | None = None
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
