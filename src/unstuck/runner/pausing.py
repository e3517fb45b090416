"""Leave user code in the middle of its work.

Like StopRequested these are no `Exception`: code that catches those does not swallow them, and `finally` runs.
"""

import msgspec


class Written(msgspec.Struct, frozen=True, array_like=True):
    """An entry of the journal on its way to the worker."""

    seq: int
    kind: str
    name: str
    value: bytes
    """JSON."""
    signal: int | None = None
    """The number of the signal that is taken by it."""


class Pause(msgspec.Struct, frozen=True, array_like=True):
    """How an attempt gave its slot back."""

    delay_s: float | None
    """It goes on after so long; None: with the signal alone."""
    awaits: str | None = None
    entry: Written | None = None
    """Written in the commit that suspends it; None where it is written already."""


class Suspended(BaseException):
    """The job gives its slot back, and begins again when its time or its signal has come: let it pass."""

    def __init__(self, pause: Pause) -> None:
        super().__init__("the job waits, and gives its slot back; let this pass")
        self.pause = pause


class Superseded(BaseException):
    """Somebody else has this job by now, so nothing can be written down any more: this attempt is about to end."""


def suspension_in(error: BaseException) -> Suspended | None:
    """Find a suspension in what user code raised; a TaskGroup wraps it."""
    if isinstance(error, Suspended):
        return error
    if isinstance(error, BaseExceptionGroup):
        return next((found for one in error.exceptions if (found := suspension_in(one)) is not None), None)
    return None
