"""Say what became of one attempt, before any policy is asked."""

import msgspec

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


class Overran(msgspec.Struct, frozen=True):
    """The hard deadline passed."""

    cause: str


class Cancelled(msgspec.Struct, frozen=True):
    cause: str


Outcome = Succeeded | Raised | NotStorable | Died | Overran | Cancelled
