"""Say what keeps a task's jobs in order: their line, how long they are good for, how long they are kept."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from string import Formatter
from typing import Any

import msgspec

from unstuck.domain.durations import seconds
from unstuck.domain.errors import ConfigError

MAX_KEY_CHARS = 500
MAX_PLACES_IN_LINE = 1_000_000

KeyFunction = Callable[..., str]


class Order(msgspec.Struct, frozen=True, omit_defaults=True):
    """What every job of a task has unless its enqueue says otherwise. Stored with the policy, so that doors without
    the app know it."""

    key: str | None = None
    """A text with names of arguments in braces, `customer:{customer_id}`."""
    computed: bool = False
    """A function of the app gives the key: other doors must be told it."""
    limit: int = 1
    parameters: tuple[str, ...] = ()
    """What the arguments are called that come by place; with the defaults of those that may be left out."""
    defaults: dict[str, Any] = {}
    expires_s: float | None = None
    keep_s: float | None = None


def read_order(task: str, settings: Mapping[str, Any], parameters: Mapping[str, Any]) -> Order:
    """Read the settings of a task; `parameters` are those of its function, with their defaults (or `...`)."""
    key, limit = settings.get("concurrency_key"), settings.get("concurrency_limit", 1)
    if key is None and "concurrency_limit" in settings:
        raise ConfigError(
            f"Task {task!r} has a concurrency_limit and no concurrency_key. Give it a key ({task!r} for all of its "
            "jobs), or limit its queue with app.queue(…, concurrency=…)."
        )
    check_limit(limit)
    expires, keep = settings.get("expires"), settings.get("keep")
    plain = Order(
        expires_s=None if expires is None else positive_s(expires, "expires"),
        keep_s=None if keep is None else positive_s(keep, "keep"),
    )
    if key is None:
        return plain
    if callable(key):
        return msgspec.structs.replace(plain, computed=True, limit=limit)
    check_key(key, "concurrency_key")
    simple = (str, int, float, bool, type(None))
    defaults = {name: value for name, value in parameters.items() if isinstance(value, simple)}
    order = msgspec.structs.replace(plain, key=key, limit=limit, parameters=tuple(parameters), defaults=defaults)
    # Found when the task is built, not at night: every name in braces must be an argument.
    _fill(order, tuple("0" for _ in parameters), dict.fromkeys(parameters, "0"), task)
    return order


def line_of(order: Order, args: tuple[Any, ...], kwargs: Mapping[str, Any], task: str) -> str | None:
    """Give the line in which a call with these arguments stands, if its task has one."""
    if order.computed:
        raise ConfigError(f"The concurrency key of task {task!r} is computed by its app. Say it: concurrency_key=….")
    if order.key is None:
        return None
    key = _fill(order, args, {**order.defaults, **dict(zip(order.parameters, args, strict=False)), **kwargs}, task)
    check_key(key, "concurrency_key")
    return key


def names_in_key(order: Order) -> tuple[str, ...]:
    """Return the names of the arguments that the key of a task is made of."""
    return () if order.key is None else tuple(_fields(order.key))


def refuse_unknown(order: Order, unknown: Collection[str | int], task: str) -> None:
    """Raise ConfigError where the key is made of arguments that are not known yet, given by their names and places."""
    if order.key is None:
        return
    named = {order.parameters[one] if isinstance(one, int) and one < len(order.parameters) else one for one in unknown}
    for name in _fields(order.key):
        place = int(name) if name.isdecimal() else None
        if name in named or (place is not None and place in unknown):
            raise ConfigError(
                f"The concurrency_key {order.key!r} of task {task!r} is made of {name!r}, which this node gets from "
                'another: nobody knows it when the workflow starts. Give a value, or task.options(concurrency_key="…").'
            )


def _fields(template: str) -> Iterator[str]:
    """Give the arguments that a key names, also those within a format."""
    for _, field, format_spec, _ in Formatter().parse(template):
        if field is not None:
            yield re.split(r"[.\[]", field, maxsplit=1)[0]
            yield from _fields(format_spec or "")


def _fill(order: Order, args: tuple[Any, ...], named: Mapping[str, Any], task: str) -> str:
    assert order.key is not None
    try:
        return order.key.format(*args, **named)
    except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        known = f" Its arguments: {', '.join(order.parameters)}." if order.parameters else ""
        raise ConfigError(
            f"The concurrency_key {order.key!r} of task {task!r} cannot be filled in: {error!r}.{known}"
        ) from None


def check_key(key: object, what: str) -> None:
    """Refuse what cannot be a key, or raise ConfigError."""
    if not isinstance(key, str) or not key or len(key) > MAX_KEY_CHARS or "\0" in key:
        raise ConfigError(f"{what} must be text of 1 to {MAX_KEY_CHARS} characters, not {key!r:.80}.")
    try:
        key.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(f"{what} holds a lone surrogate, which is no text.") from error


def check_limit(limit: object) -> None:
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= MAX_PLACES_IN_LINE:
        raise ConfigError(f"concurrency_limit must be a whole number from 1 to {MAX_PLACES_IN_LINE}, not {limit!r}.")


def positive_s(value: Any, what: str) -> float:
    found_s = seconds(value, what)
    if found_s <= 0:
        raise ConfigError(f"{what} must be above zero.")
    return found_s
