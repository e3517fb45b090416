"""Say what became of one attempt, before any policy is asked."""

from typing import Literal

import msgspec

from unstuck.domain.autopsy import Autopsy
from unstuck.domain.errors import ErrorCode


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
    awaits: str | None = None
    """The signal that it waits for; None where it only sleeps."""


Outcome = Succeeded | Raised | NotStorable | Died | Overran | Stalled | Cancelled | Suspended
