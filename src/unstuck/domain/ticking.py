"""Say when a schedule ticks: by a cron expression in a time zone, or every so many seconds. Pure; time is an argument.

Times of day that a cron expression names (`30 2 * * *`) tick once a day also when clocks are set: one that is skipped
ticks at the first moment after the gap, one that comes twice ticks the first time. Expressions that begin with `*` in
minutes or hours (`*/5 * * * *`) go by real time: they tick in both of two equal hours, and not in one that is skipped.
"""

import functools
import zoneinfo
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, tzinfo

import msgspec
from cronsim import CronSim, CronSimError

from unstuck.domain.durations import brief
from unstuck.domain.errors import ConfigError
from unstuck.domain.names import did_you_mean

LEAST_EVERY_S = 1.0
MAX_CRON_CHARS = 200
MAX_ZONE_CHARS = 100
LONGEST_GAP = timedelta(days=2)
"""No zone ever skipped more of the calendar at once."""
_MICRO = 1_000_000


class Timing(msgspec.Struct, frozen=True, omit_defaults=True):
    """When a schedule ticks: exactly one of `cron` and `every_s`."""

    cron: str | None = None
    every_s: float | None = None
    zone: str = "UTC"

    def __str__(self) -> str:
        return f"{self.cron} ({self.zone})" if self.cron is not None else f"every {brief(self.every_s or 0.0)}"


def in_words(timing: Timing) -> str:
    """Say when it ticks as people do, without its zone: "at 03:00 on Monday", "every 30s"."""
    if timing.cron is None:
        return str(timing)
    said = CronSim(timing.cron, datetime.fromtimestamp(0, UTC)).explain()
    return said[:1].lower() + said[1:]


def checked_timing(cron: str | None, every_s: float | None, zone: str, owner: str) -> Timing:
    """Give the timing, or raise ConfigError that says what is wrong with it and what to write instead."""
    if (cron is None) == (every_s is None):
        raise ConfigError(f"{owner} needs either a cron expression or every=…, and not both.")
    if every_s is not None:
        if every_s < LEAST_EVERY_S:
            raise ConfigError(
                f"{owner}: every must be at least {brief(LEAST_EVERY_S)}. What is due more often is better done by "
                "one job that loops."
            )
        return Timing(every_s=round(every_s * _MICRO) / _MICRO)
    assert cron is not None
    timing = Timing(cron=_checked_cron(cron, owner), zone=_checked_zone(zone, owner))
    if next_after(timing, 0.0) is None:
        raise ConfigError(f"{owner}: {cron!r} never comes: no date fits it. Mend day, month or weekday.")
    return timing


def next_after(timing: Timing, after: float) -> float | None:
    """Give the first tick later than a moment (seconds since 1970); None where none ever comes.

    An interval ticks at the multiples of its length since 1970: so it ticks at the same moments in every process, and
    after every restart."""
    if timing.every_s is not None:
        every_us = round(timing.every_s * _MICRO)
        return (round(after * _MICRO) // every_us + 1) * every_us / _MICRO
    assert timing.cron is not None
    return next(_cron_ticks(timing.cron, _zone(timing.zone), after), None)


def last_until(timing: Timing, since: float, until: float) -> float | None:
    """Give the last tick later than `since` and not later than `until`; None where there is none."""
    if timing.every_s is not None:
        every_us = round(timing.every_s * _MICRO)
        tick = round(until * _MICRO) // every_us * every_us / _MICRO
        return tick if tick > since else None
    # The next tick after a moment only moves forward with it: gallop back, then halve. Counting every tick of a year in
    # which nobody was there would take minutes.
    step_s = 1.0
    while until - step_s > since and not _ticks_within(timing, until - step_s, until):
        step_s *= 2
    low, high = max(until - step_s, since), until
    if not _ticks_within(timing, low, until):
        return None
    while high - low > 0.5:
        middle = (low + high) / 2
        low, high = (middle, high) if _ticks_within(timing, middle, until) else (low, middle)
    return next_after(timing, low)


def _ticks_within(timing: Timing, after: float, until: float) -> bool:
    tick = next_after(timing, after)
    return tick is not None and tick <= until


def _cron_ticks(cron: str, zone: tzinfo, after: float) -> Iterator[float]:
    """Give the ticks after a moment, in order and each once."""
    start = datetime.fromtimestamp(after, UTC).astimezone(zone)
    minute, hour = cron.split()[-5:-3]
    named = not minute.startswith("*") and not hour.startswith("*")
    # In a repeated hour the clock on the wall may show less than when the hour began: look again from before it.
    walls = CronSim(cron, (start - timedelta(hours=3)).replace(tzinfo=None) if named else start)
    last = after
    for wall in walls:
        moment = _first_real(wall.replace(tzinfo=zone, fold=0)) if named else wall
        tick = moment.timestamp()
        if tick > last and (named or _is_real(moment)):
            last = tick
            yield tick


def _first_real(wall: datetime) -> datetime:
    """Give the first moment from this one on that the clocks of its zone really show."""
    end = wall + LONGEST_GAP
    while not _is_real(wall) and wall < end:
        wall = wall.replace(second=0) + timedelta(minutes=1)
    return wall


def _is_real(wall: datetime) -> bool:
    back = wall.astimezone(UTC).astimezone(wall.tzinfo)
    return wall.replace(tzinfo=None, fold=0) == back.replace(tzinfo=None, fold=0)


def _checked_cron(cron: object, owner: str) -> str:
    if not isinstance(cron, str) or len(cron) > MAX_CRON_CHARS:
        raise ConfigError(f"{owner}: a cron expression is text like '*/5 * * * *', not {cron!r:.80}.")
    text = " ".join(cron.split())
    try:
        CronSim(text, datetime(2026, 1, 1))
    except (CronSimError, ValueError, AssertionError) as error:
        raise ConfigError(
            f"{owner}: {cron!r} is not a cron expression ({error or 'it cannot be read'}). Write five fields: minute, "
            "hour, day of month, month, day of week, as in '30 6 * * MON-FRI'; six begin with seconds."
        ) from None
    return text


def _checked_zone(zone: object, owner: str) -> str:
    try:
        if isinstance(zone, str) and 0 < len(zone) <= MAX_ZONE_CHARS:
            _zone(zone)
            return zone
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        pass
    known = _known_zones()
    cure = did_you_mean(f"{zone!s:.{MAX_ZONE_CHARS}}", known) or (
        " Use a name like 'Europe/Berlin' or 'UTC'."
        if len(known) > 1
        else " This machine knows no time zones: install the package tzdata."
    )
    raise ConfigError(f"{owner}: there is no time zone {zone!r:.80}.{cure}")


@functools.cache
def _known_zones() -> frozenset[str]:
    # Finding them reads hundreds of files.
    return frozenset(zoneinfo.available_timezones())


@functools.lru_cache(maxsize=256)
def _zone(name: str) -> tzinfo:
    return UTC if name == "UTC" else zoneinfo.ZoneInfo(name)
