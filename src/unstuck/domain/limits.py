"""Limits of queues and concurrency keys: how many jobs may run at once, and how many start in a window of time."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from string import Formatter
from typing import Any

import msgspec

from unstuck.domain.units import seconds
from unstuck.errors import ConfigError

MAX_CONCURRENCY = 1_000_000
MAX_RATE = 1_000_000_000.0
MAX_RATE_CHARS = 100
UNLIMITED = 2**31 - 1

_WINDOWS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_RATE = re.compile(r"(\d+)\s*/\s*(\d+)?\s*(s|m|h|d)")


class QueueLimit(msgspec.Struct, frozen=True):
    """What may be taken from a queue, across all workers; None: as much as there is."""

    concurrency: int | None = None
    rate: float | None = None
    """So many may be begun in `window_s`; as many at once after a time of rest."""
    window_s: float | None = None

    def __bool__(self) -> bool:
        return self.concurrency is not None or self.rate is not None


class Room(msgspec.Struct, frozen=True):
    """How much may be taken of a queue now."""

    jobs: int
    in_s: float | None = None
    """When there is a token again, where that is all that is missing."""
    tokens: float | None = None


def read_limit(concurrency: object, rate: object) -> QueueLimit:
    """Read what people wrote, or raise ConfigError with how to write it."""
    if concurrency is not None and (
        isinstance(concurrency, bool) or not isinstance(concurrency, int) or not 1 <= concurrency <= MAX_CONCURRENCY
    ):
        raise ConfigError(f"concurrency must be a whole number from 1 to {MAX_CONCURRENCY}, not {concurrency!r:.80}.")
    if rate is None:
        return QueueLimit(concurrency)
    return QueueLimit(concurrency, *read_rate(rate))


def read_rate(text: object) -> tuple[float, float]:
    """Read "100/m" as (100, 60.0): so many in so many seconds."""
    short = isinstance(text, str) and len(text) <= MAX_RATE_CHARS
    found = _RATE.fullmatch(str(text).strip().lower()) if short else None
    if found is None:
        raise ConfigError(f"rate must be written as '10/s', '100/m', '5000/h' or '1/10s', not {text!r:.80}.")
    count, windows, unit = found.groups()
    rate, window_s = float(count), float(windows or 1) * _WINDOWS_S[unit]
    if not 1 <= rate <= MAX_RATE or not 0 < window_s <= 366 * 86400.0:
        raise ConfigError(f"rate must be at least one in a year, and at most {MAX_RATE:.0e}, not {text!r:.80}.")
    return rate, window_s


def write_rate(rate: float, window_s: float) -> str:
    """Write it as people do: 100/m, 1/10s."""
    for unit, size_s in reversed(_WINDOWS_S.items()):
        if window_s % size_s == 0:
            times = window_s / size_s
            return f"{rate:g}/{'' if times == 1 else f'{times:g}'}{unit}"
    return f"{rate:g}/{window_s:g}s"


def limit_in_words(limit: QueueLimit) -> str:
    said = [] if limit.concurrency is None else [f"{limit.concurrency} at once"]
    if limit.rate is not None and limit.window_s is not None:
        said.append(write_rate(limit.rate, limit.window_s))
    return ", ".join(said) or "no limit"


def available(limit: QueueLimit, held: int, tokens: float | None, since_s: float) -> Room:
    """Return how many more may be taken, with `held` in hand and a bucket that had `tokens` tokens `since_s` ago.

    A bucket that was never taken from is full. A clock that was set back (`since_s` below zero) counts as no time."""
    jobs = UNLIMITED if limit.concurrency is None else max(0, limit.concurrency - held)
    if limit.rate is None or limit.window_s is None:
        return Room(jobs)
    filled = max(0.0, since_s) * limit.rate / limit.window_s
    now = limit.rate if tokens is None else min(limit.rate, tokens + filled)
    missing_s = (1 - now) * limit.window_s / limit.rate if now < 1 and jobs > 0 else None
    return Room(min(jobs, int(now)), missing_s, now)


MAX_KEY_CHARS = 500
MAX_CONCURRENCY_LIMIT = 1_000_000

KeyFunction = Callable[..., str]


class KeyRule(msgspec.Struct, frozen=True, omit_defaults=True, rename={"retain_s": "keep_s"}):
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
    retain_s: float | None = None


def read_key_rule(task: str, settings: Mapping[str, Any], parameters: Mapping[str, Any]) -> KeyRule:
    """Read the settings of a task; `parameters` are those of its function, with their defaults (or `...`)."""
    key, limit = settings.get("concurrency_key"), settings.get("concurrency_limit", 1)
    if key is None and "concurrency_limit" in settings:
        raise ConfigError(
            f"Task {task!r} has a concurrency_limit and no concurrency_key. Give it a key ({task!r} for all of its "
            "jobs), or limit its queue with app.queue(…, concurrency=…)."
        )
    check_limit(limit)
    expires, keep = settings.get("expires"), settings.get("keep")
    plain = KeyRule(
        expires_s=None if expires is None else positive_s(expires, "expires"),
        retain_s=None if keep is None else positive_s(keep, "keep"),
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


def concurrency_key_of(order: KeyRule, args: tuple[Any, ...], kwargs: Mapping[str, Any], task: str) -> str | None:
    """Give the line in which a call with these arguments stands, if its task has one."""
    if order.computed:
        raise ConfigError(f"The concurrency key of task {task!r} is computed by its app. Say it: concurrency_key=….")
    if order.key is None:
        return None
    key = _fill(order, args, {**order.defaults, **dict(zip(order.parameters, args, strict=False)), **kwargs}, task)
    check_key(key, "concurrency_key")
    return key


def names_in_key(order: KeyRule) -> tuple[str, ...]:
    """Return the names of the arguments that the key of a task is made of."""
    return () if order.key is None else tuple(_fields(order.key))


def refuse_unknown(order: KeyRule, unknown: Collection[str | int], task: str) -> None:
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


def _fill(order: KeyRule, args: tuple[Any, ...], named: Mapping[str, Any], task: str) -> str:
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
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= MAX_CONCURRENCY_LIMIT:
        raise ConfigError(f"concurrency_limit must be a whole number from 1 to {MAX_CONCURRENCY_LIMIT}, not {limit!r}.")


def positive_s(value: Any, what: str) -> float:
    found_s = seconds(value, what)
    if found_s <= 0:
        raise ConfigError(f"{what} must be above zero.")
    return found_s
