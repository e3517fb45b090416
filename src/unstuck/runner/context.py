"""Tell user code which attempt it is, and let it say that it lives: the `Context` that a task may ask for."""

import math
import numbers
from contextvars import ContextVar
from datetime import datetime

import msgspec

from unstuck.runner.signs import Signs

_signs: Signs | None = None


class Context(msgspec.Struct, frozen=True, gc=False):
    """The facts of the attempt that is running."""

    job_id: int
    task: str
    queue: str
    attempt: int
    """1 for the first try, and so on."""
    crash_count: int
    """How many earlier tries ended by the death of their process."""
    worker_id: str
    token: int = 0
    """Unique to this attempt and never reused: a fence for systems of your own."""
    scheduled_for: datetime | None = None
    """The tick that a schedule enqueued it for, in UTC; None where something else did."""

    def heartbeat(self) -> None:
        """Say that the logic makes progress: a task with `stall_timeout` must do so more often than that.

        Cheap enough for a tight loop, and safe from any thread. Outside a worker it does nothing."""
        if _signs is not None:
            _signs.heartbeat(self.token)

    def progress(self, done: float | None = None, total: float | None = None, message: str | None = None) -> None:
        """Say how far the job is; people see it, and it counts as a heartbeat."""
        for name, value in (("done", done), ("total", total)):
            if value is not None and not _is_number(value):
                raise ValueError(f"ctx.progress: {name} must be a finite number or None, not {value!r:.80}.")
        if message is not None and not isinstance(message, str):
            raise ValueError(f"ctx.progress: message must be text or None, not {message!r:.80}.")
        if _signs is not None:
            _signs.progress(self.token, _number(done), _number(total), message)


def _is_number(value: object) -> bool:
    """Say whether it can be shown; numpy's numbers can."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def _number(value: float | None) -> float | None:
    return None if value is None else float(value)


_current: ContextVar[Context] = ContextVar("unstuck_context")


def current_context() -> Context:
    """Give the Context of the job that is running here, or raise LookupError outside of one."""
    try:
        return _current.get()
    except LookupError:
        raise LookupError(
            "There is no current job: current_context() works only inside a task while a worker runs it."
        ) from None


def current_token() -> int:
    """Give the token of the attempt that is running here; 0 outside of one."""
    context = _current.get(None)
    return 0 if context is None else context.token


def set_context(context: Context) -> None:
    _current.set(context)


def connect(signs: Signs) -> None:
    """Let every Context of this process reach its worker."""
    global _signs
    _signs = signs
