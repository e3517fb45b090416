"""Tell user code which attempt it is: the `Context` that a task may ask for."""

from contextvars import ContextVar

import msgspec


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


_current: ContextVar[Context] = ContextVar("unstuck_context")


def current_context() -> Context:
    """Give the Context of the job that is running here, or raise LookupError outside of one."""
    try:
        return _current.get()
    except LookupError:
        raise LookupError(
            "There is no current job: current_context() works only inside a task while a worker runs it."
        ) from None


def set_context(context: Context) -> None:
    _current.set(context)
