"""Say how many jobs of a queue may be taken now: at once, and in a window of time."""

import re

import msgspec

from unstuck.domain.errors import ConfigError

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


def room(limit: QueueLimit, held: int, tokens: float | None, since_s: float) -> Room:
    """Return how many more may be taken, with `held` in hand and a bucket that had `tokens` tokens `since_s` ago.

    A bucket that was never taken from is full. A clock that was set back (`since_s` below zero) counts as no time."""
    jobs = UNLIMITED if limit.concurrency is None else max(0, limit.concurrency - held)
    if limit.rate is None or limit.window_s is None:
        return Room(jobs)
    filled = max(0.0, since_s) * limit.rate / limit.window_s
    now = limit.rate if tokens is None else min(limit.rate, tokens + filled)
    missing_s = (1 - now) * limit.window_s / limit.rate if now < 1 and jobs > 0 else None
    return Room(min(jobs, int(now)), missing_s, now)
