"""The public `Context`: what user code can learn and report about its attempt."""

import asyncio
import functools
import inspect
import math
import numbers
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from datetime import datetime
from typing import Any, ParamSpec, TypeVar, cast, overload

import msgspec

from unstuck.domain.journal import checked_name
from unstuck.domain.payload import decode
from unstuck.domain.units import Duration, seconds
from unstuck.runner.journal import Journal, Journals
from unstuck.runner.messages import NewEntry
from unstuck.runner.monitor import JobSignals

P = ParamSpec("P")
R = TypeVar("R")

_signals: JobSignals | None = None
_journals: Journals | None = None


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
        if _signals is not None:
            _signals.heartbeat(self.token)

    def progress(self, done: float | None = None, total: float | None = None, message: str | None = None) -> None:
        """Say how far the job is; people see it, and it counts as a heartbeat."""
        for name, value in (("done", done), ("total", total)):
            if value is not None and not _is_number(value):
                raise ValueError(f"ctx.progress: {name} must be a finite number or None, not {value!r:.80}.")
        if message is not None and not isinstance(message, str):
            raise ValueError(f"ctx.progress: message must be text or None, not {message!r:.80}.")
        if _signals is not None:
            _signals.progress(self.token, _number(done), _number(total), message)

    # Steps ------------------------------------------------------------------------------------

    def step(self, name: str, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a function once for this job: its result (JSON) is stored before this returns, and after a crash or a
        retry it comes back without another call. What raises is not stored.

        Steps are found again by their order and their names, so both must stay the same while jobs are on their way.
        Given is what is stored: a tuple comes as a list, the first time too. Outside a worker it is only called."""
        journal = self._journal()
        if journal is None:
            return function(*args, **kwargs)
        _refuse_to_block("step")
        place = journal.begin_step(name)
        if place.found is not None:
            return cast(R, decode(place.found.value))
        entry = journal.step_entry(place, function(*args, **kwargs))
        journal.write(entry)
        return cast(R, decode(entry.value))

    @overload
    async def step_async(
        self, name: str, function: Callable[P, Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> R: ...

    @overload
    async def step_async(self, name: str, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...

    async def step_async(self, name: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Like `step`, for async code: of a coroutine function, or of a plain one that does not block."""
        journal = self._journal()
        if journal is None:
            return await _outcome(function, args, kwargs)
        place = journal.begin_step(name)
        if place.found is not None:
            return decode(place.found.value)
        entry = journal.step_entry(place, await _outcome(function, args, kwargs))
        await journal.write_async(entry)
        return decode(entry.value)

    def checkpoint(self, state: Any) -> None:
        """Remember where a loop is (JSON); the next attempt finds the last one in `last_checkpoint`.

        Cheap enough for every turn of a loop: the worker has it within a second, and writes it at once. The last
        one before an error, a sleep or the end always counts; where a process is killed or a machine is lost, the last
        second of them may be lost too."""
        journal = self._journal()
        if journal is not None:
            journal.set_checkpoint(state)

    @property
    def last_checkpoint(self) -> Any:
        """The last state that this job gave to `checkpoint`, in this attempt or an earlier one; None at first."""
        journal = self._journal()
        return None if journal is None else journal.checkpoint

    def sleep(self, duration: Duration) -> None:
        """Give the slot back for so long. The job begins again then, and what is written down is not done again.

        It leaves your code by an exception that is no `Exception`; `finally` runs. Outside a worker it does nothing."""
        delay_s = seconds(duration, "ctx.sleep")
        journal = self._journal()
        if journal is not None:
            _refuse_to_block("sleep")
            journal.sleep(delay_s)

    async def sleep_async(self, duration: Duration) -> None:
        """Like `sleep`, for async code."""
        delay_s = seconds(duration, "ctx.sleep_async")
        journal = self._journal()
        if journal is not None:
            journal.sleep(delay_s)

    def wait_signal(self, name: str, timeout: Duration | None = None) -> Any:
        """Give the slot back until somebody sends this signal (`job.signal(name, value)`), and give its value.

        One that came before is taken at once; several are taken in their order, each once. SignalTimeout when none came
        in time."""
        _refuse_to_block("wait_signal")
        journal, entry = self._wait(name, timeout)
        if isinstance(entry, NewEntry):
            journal.write(entry)
        return journal.received(entry)

    async def wait_signal_async(self, name: str, timeout: Duration | None = None) -> Any:  # noqa: ASYNC109 - as in `wait_signal`
        """Like `wait_signal`, for async code."""
        journal, entry = self._wait(name, timeout)
        if isinstance(entry, NewEntry):
            await journal.write_async(entry)
        return journal.received(entry)

    def enqueue(self, task: Any, /, *args: Any, **kwargs: Any) -> None:
        """Have a job enqueued when this one succeeds, in the same commit; if it does not, never.

        `task` is a task of this app, with `task.options(…)` where wanted, or its name."""
        journal = self._journal()
        if journal is None or _journals is None:
            raise LookupError(
                "ctx.enqueue works only inside a task while a worker runs it. Use task.enqueue(…) elsewhere."
            )
        journal.follow(_journals.pack(task, args, kwargs, self.job_id))

    # ------------------------------------------------------------------------------------------

    def _journal(self) -> Journal | None:
        return None if _journals is None else _journals.of(self.token)

    def _wait(self, name: str, timeout: Duration | None) -> tuple[Journal, Any]:
        journal = self._journal()
        if journal is None:
            raise LookupError("A job can wait for a signal only while a worker runs it: nobody could send one here.")
        return journal, journal.wait(name, None if timeout is None else seconds(timeout, "timeout"))


async def _outcome(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    value = function(*args, **kwargs)
    return await value if inspect.isawaitable(value) else value


def _refuse_to_block(verb: str) -> None:
    if asyncio._get_running_loop() is not None:
        raise RuntimeError(f"ctx.{verb} would block the event loop. In async code write `await ctx.{verb}_async(…)`.")


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


def find_context() -> Context | None:
    """Give the Context of the job that is running here; None outside of one."""
    return _current.get(None)


def connect(signs: JobSignals, journals: Journals) -> None:
    """Let every Context of this process reach its worker."""
    global _signals, _journals
    _signals, _journals = signs, journals


@overload
def step(function: Callable[P, R], /) -> Callable[P, R]: ...


@overload
def step(*, name: str | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def step(function: Any = None, /, *, name: str | None = None) -> Any:
    """Let calls of this function be steps of the job that runs, under its name (or `name=`). Outside a job it is called
    as ever. A coroutine function stays one."""
    if function is None:
        return lambda decorated: _decorated(decorated, name)
    return _decorated(function, name)


def _decorated(function: Callable[..., Any], name: str | None) -> Callable[..., Any]:
    called = checked_name(name or getattr(function, "__name__", "step"), "step")
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def step_async(*args: Any, **kwargs: Any) -> Any:
            context: Context | None = find_context()
            if context is None:
                return await function(*args, **kwargs)
            return await context.step_async(called, function, *args, **kwargs)

        return step_async

    @functools.wraps(function)
    def step_sync(*args: Any, **kwargs: Any) -> Any:
        context: Context | None = find_context()
        if context is None:
            return function(*args, **kwargs)
        return context.step(called, function, *args, **kwargs)

    return step_sync
