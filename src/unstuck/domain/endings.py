"""Describe the one write that ends an attempt: fenced by its token, whoever makes it."""

from typing import Any, Literal

import msgspec

from unstuck.domain.autopsy import Autopsy
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
