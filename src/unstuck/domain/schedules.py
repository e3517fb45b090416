"""When a schedule is due: by a cron expression in a time zone, or every given number of seconds. Pure.

Times of day that a cron expression names (`30 2 * * *`) tick once a day also when clocks are set: one that is skipped
ticks at the first moment after the gap, one that comes twice ticks the first time. Expressions that begin with `*` in
minutes or hours (`*/5 * * * *`) go by real time: they tick in both of two equal hours, and not in one that is skipped.
"""

import functools
import hashlib
import zoneinfo
from collections import deque
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Literal

import msgspec
from cronsim import CronSim, CronSimError

from unstuck.domain.text import did_you_mean
from unstuck.domain.units import brief
from unstuck.errors import ConfigError

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


CatchUp = Literal["skip", "latest", "all"]
CATCH_UPS: tuple[CatchUp, ...] = ("skip", "latest", "all")

ON_TIME_S = 30.0
"""A tick that is enqueued within this time is on time: a worker died and the next one took over, nothing was missed."""
MAX_CAUGHT_UP = 1_000
"""So many of the newest are made up for, at most."""
NEVER = 253_370_764_799.0
"""The end of the calendar: when a schedule ticks next that never does."""
CLOCK_SET_BACK_S = 3600.0
"""A last tick that lies further ahead than this was made by a clock that was wrong."""
INTERVAL_SET_BACK_S = 600.0
"""The same for an interval, or ten intervals if that is longer: it is there to go on, not to name times of day."""
INTERVALS_SET_BACK = 10.0


class DueRuns(msgspec.Struct, frozen=True):
    ticks: tuple[float, ...] = ()
    """Those to enqueue, in order."""
    next_at: float = 0.0
    missed: int = 0
    """So many were due and are not enqueued (at least, where `many`)."""
    many: bool = False
    set_back: bool = False
    """The clock was far ahead when it ticked last: it begins anew from now."""


def due_runs(timing: Timing, catch_up: CatchUp, next_at: float | None, last_at: float | None, now: float) -> DueRuns:
    """Say what is to be done at `now`, for a schedule whose next tick is `next_at` (None: it begins just now)."""
    if last_at is not None and last_at > now + _tolerated_s(timing):
        return DueRuns(next_at=_next(timing, now), set_back=True)
    if next_at is None:
        # No tick twice, also where the definition changed or the clock was set back a little.
        return DueRuns(next_at=_next(timing, now if last_at is None else max(now, last_at)))
    if next_at > now:
        return DueRuns(next_at=next_at)
    following = _next(timing, now)
    if now - next_at <= ON_TIME_S:
        due, _ = _due(timing, next_at, now)
        return DueRuns(tuple(due), following)
    if catch_up == "all":
        due, dropped = _due(timing, next_at, now)
        return DueRuns(tuple(due), following, dropped, many=dropped > 0)
    latest = last_until(timing, next_at, now) or next_at
    taken = (latest,) if catch_up == "latest" or now - latest <= ON_TIME_S else ()
    missed, many = _count(timing, next_at, now)
    return DueRuns(taken, following, missed - len(taken), many)


def _tolerated_s(timing: Timing) -> float:
    """Return how far ahead the last tick may lie. The ledgers ask by the same rule which schedules are due."""
    if timing.every_s is None:
        return CLOCK_SET_BACK_S
    return min(CLOCK_SET_BACK_S, max(INTERVAL_SET_BACK_S, INTERVALS_SET_BACK * timing.every_s))


def _next(timing: Timing, after: float) -> float:
    tick = next_after(timing, after)
    return NEVER if tick is None else tick


def _due(timing: Timing, first: float, now: float) -> tuple[list[float], int]:
    """Give the newest ticks from `first` until now, and how many there are before them (1: one or more)."""
    ticks = _forward(timing, first, now)
    if len(ticks) <= MAX_CAUGHT_UP:
        return ticks, 0
    newest: deque[float] = deque()
    until = now
    while len(newest) < MAX_CAUGHT_UP and (tick := last_until(timing, first, until)) is not None:
        newest.appendleft(tick)
        until = tick - 1e-6
    return list(newest), 1


def _count(timing: Timing, first: float, now: float) -> tuple[int, bool]:
    ticks = _forward(timing, first, now)
    return min(len(ticks), MAX_CAUGHT_UP), len(ticks) > MAX_CAUGHT_UP


def _forward(timing: Timing, first: float, now: float) -> list[float]:
    """Give the ticks from `first` on until now, one more than may be made up for at most."""
    ticks = [first]
    while len(ticks) <= MAX_CAUGHT_UP and (tick := next_after(timing, ticks[-1])) is not None and tick <= now:
        ticks.append(tick)
    return ticks


Source = Literal["app", "operator"]
FINGERPRINT_CHARS = 20


class ScheduleDefinition(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str
    task: str
    queue: str
    timing: Timing
    job: bytes
    """The job that is enqueued at each tick, as the store packs it: opaque here."""
    catch_up: CatchUp = "latest"

    @property
    def fingerprint(self) -> str:
        """Change when anything in it changes: a worker fires only what it knows exactly so."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:FINGERPRINT_CHARS]


def is_known_to(metadata: Mapping[str, object], fingerprint: str) -> bool:
    """Return whether a worker that describes itself so has exactly this definition in its code."""
    told = metadata.get("schedules")
    return isinstance(told, list) and fingerprint in told


def fire_time_text(tick: float) -> str:
    """Write a tick the way it is shown: 2026-11-17T12:00:00Z."""
    moment = datetime.fromtimestamp(tick, UTC)
    return moment.isoformat(timespec="seconds" if not moment.microsecond else "milliseconds").replace("+00:00", "Z")


def enqueued_by(name: str, tick: float) -> str:
    """Say who enqueued a job, for its story."""
    return f"schedule {name} for {fire_time_text(tick)}"
