"""Read what a callable means as a task, and refuse the callables that no worker could run."""

import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from unstuck.client.task import Task
from unstuck.errors import ConfigError
from unstuck.runner.context import Context

_BY_NAME = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.KEYWORD_ONLY,
)
_CONTEXT_IN_WORDS = re.compile(r"(\w+\.)*Context|(\w+\.)*Context ?\| ?None|(\w+\.)*Optional\[(\w+\.)*Context\]")


@dataclass(frozen=True)
class TaskFunction:
    """A callable that can be a task."""

    function: Callable[..., Any]
    name: str | None
    """Its own name; None if it has none, as a lambda or a partial."""
    is_async: bool
    context_parameter: str | None
    """The parameter annotated with Context, if there is one."""
    parameters: tuple[inspect.Parameter, ...]
    """The parameters that a caller fills, without the Context; empty if Python cannot tell."""

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Return the parameters that have a name, with their defaults, or `...` for those without one."""
        return {
            item.name: ... if item.default is inspect.Parameter.empty else item.default
            for item in self.parameters
            if item.kind in _BY_NAME
        }


def read_function(given: Any) -> TaskFunction:
    """Return the callable with all that matters about it, or raise ConfigError with what to register instead."""
    if isinstance(given, staticmethod):
        given = given.__func__
    _refuse_non_functions(given)
    code = _code_of(given)
    _refuse_generators(given, code)
    parameters = _parameters(given)
    _refuse_methods(given, parameters)
    context = _context_parameter(code, {item.name for item in parameters} if parameters is not None else None, given)
    return TaskFunction(
        function=given,
        name=_own_name(given),
        is_async=inspect.iscoroutinefunction(given) or inspect.iscoroutinefunction(code),
        context_parameter=context,
        parameters=tuple(item for item in parameters or () if item.name != context),
    )


def shown(given: Any) -> str:
    """Return the name that a message gives a callable."""
    while isinstance(given, functools.partial):
        given = given.func
    name = getattr(given, "__qualname__", None) or type(given).__qualname__
    return repr(str(name).rpartition("<locals>.")[2])


def _refuse_non_functions(given: Any) -> None:
    if isinstance(given, Task):
        raise ConfigError(f"{given.name!r} is a task already, of this or another app. Register its function instead.")
    if isinstance(given, classmethod):
        raise ConfigError(
            f"@app.task cannot register the classmethod {shown(given)} before its class exists. Register it on the "
            "class, below it: app.task(Class.method)."
        )
    if isinstance(given, str):
        raise ConfigError(f"@app.task takes a function, not {given!r:.80}. Give its name as name={given!r:.80}.")
    if not callable(given):
        raise ConfigError(f"@app.task takes a function, not {given!r:.80}.")
    inner = given
    while isinstance(inner, functools.partial):
        inner = inner.func
    if isinstance(inner, type):
        raise ConfigError(
            f"@app.task takes a function, and {shown(given)} is a class. Register a function that makes the object "
            "and uses it."
        )


def _code_of(given: Any) -> Any:
    """Return the function whose code and annotations stand behind a partial or a callable object."""
    while isinstance(given, functools.partial):
        given = given.func
    if inspect.isroutine(given) or hasattr(given, "__wrapped__"):
        return given
    return type(given).__call__


def _refuse_generators(given: Any, code: Any) -> None:
    for kind, is_so in (
        ("a generator", inspect.isgeneratorfunction),
        ("an async generator", inspect.isasyncgenfunction),
    ):
        if is_so(code) or is_so(given):
            raise ConfigError(
                f"{shown(given)} is {kind}, and a job has one result. Return a list, or enqueue a job for each value."
            )


def _refuse_methods(given: Any, parameters: tuple[inspect.Parameter, ...] | None) -> None:
    first = parameters[0] if parameters else None
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if first is not None and first.name in ("self", "cls") and first.kind in positional:
        raise ConfigError(
            f"{shown(given)} takes {first.name!r}, and a worker has no object to pass. Register a function, a "
            "staticmethod or a bound method (app.task(object.method)). For facts about the job, annotate a "
            "parameter with Context."
        )


def _parameters(given: Any) -> tuple[inspect.Parameter, ...] | None:
    try:
        return tuple(inspect.signature(given).parameters.values())
    except (TypeError, ValueError):
        return None


def _own_name(given: Any) -> str | None:
    name = None if isinstance(given, functools.partial) else getattr(given, "__name__", None)
    return name if isinstance(name, str) and name != "<lambda>" else None


def _context_parameter(code: Any, passed: set[str] | None, given: Any) -> str | None:
    found = [name for name in _annotated_with_context(code) if passed is None or name in passed]
    if len(found) > 1:
        raise ConfigError(
            f"{shown(given)} has two parameters for the Context, {found[0]!r} and {found[1]!r}. Keep one."
        )
    return found[0] if found else None


def _annotated_with_context(code: Any) -> Iterator[str]:
    try:
        hints = typing.get_type_hints(code)
    except Exception:  # noqa: BLE001 - annotations may name what is not importable; then the text decides
        hints = dict(getattr(code, "__annotations__", {}))
    for name, hint in hints.items():
        if name != "return" and _is_context(hint):
            yield name


def _is_context(hint: Any) -> bool:
    if isinstance(hint, str):
        return _CONTEXT_IN_WORDS.fullmatch(hint.strip()) is not None
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return set(typing.get_args(hint)) == {Context, type(None)}
    return hint is Context
