"""Make a step of a function: `@step`. Inside a job its result is written down, and comes back after a crash."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

from unstuck.domain.journal import checked_name
from unstuck.runner.context import Context, find_context

P = ParamSpec("P")
R = TypeVar("R")


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
