"""Decide which ticks of a schedule are enqueued now, and when it is due next, also when nobody was there for long."""

from collections import deque
from typing import Literal

import msgspec

from unstuck.domain.ticking import Timing, last_until, next_after

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


class Plan(msgspec.Struct, frozen=True):
    ticks: tuple[float, ...] = ()
    """Those to enqueue, in order."""
    next_at: float = 0.0
    missed: int = 0
    """So many were due and are not enqueued (at least, where `many`)."""
    many: bool = False
    set_back: bool = False
    """The clock was far ahead when it ticked last: it begins anew from now."""


def plan(timing: Timing, catch_up: CatchUp, next_at: float | None, last_at: float | None, now: float) -> Plan:
    """Say what is to be done at `now`, for a schedule whose next tick is `next_at` (None: it begins just now)."""
    if last_at is not None and last_at > now + _tolerated_s(timing):
        return Plan(next_at=_next(timing, now), set_back=True)
    if next_at is None:
        # No tick twice, also where the definition changed or the clock was set back a little.
        return Plan(next_at=_next(timing, now if last_at is None else max(now, last_at)))
    if next_at > now:
        return Plan(next_at=next_at)
    following = _next(timing, now)
    if now - next_at <= ON_TIME_S:
        due, _ = _due(timing, next_at, now)
        return Plan(tuple(due), following)
    if catch_up == "all":
        due, dropped = _due(timing, next_at, now)
        return Plan(tuple(due), following, dropped, many=dropped > 0)
    latest = last_until(timing, next_at, now) or next_at
    taken = (latest,) if catch_up == "latest" or now - latest <= ON_TIME_S else ()
    missed, many = _count(timing, next_at, now)
    return Plan(taken, following, missed - len(taken), many)


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
