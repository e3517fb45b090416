"""Count silence only while someone watches: the rule of watch periods.

A lease must not age while nobody could write: during an outage, a hang, a failover, a frozen machine or a step of the
clock. So the ledger keeps *watch periods*, intervals of its own time in which some reaper kept reaching it. A heartbeat
that is missing counts against a worker only for the time that watch periods cover.

Each contact of a reaper is a *tick*. It claims how long the reaper was awake and in touch before it, by a clock that
nobody can set. If the claim reaches back to the end of the current period, that period is extended to now. If it does
not, nobody knows what happened in between, and a new period begins. A tick also compares two clocks: if the ledger's
went further than the reaper's own since its last contact, the claim counts nothing.

PostgreSQL does the same in its function `tick`.
"""

from collections.abc import Sequence
from enum import StrEnum

import msgspec

LEAST_SLACK_S = 0.2
MOST_SLACK_S = 1.0
FRESH_INTERVALS = 2.0
"""A period that someone extended within this many check intervals is being extended by others."""
FRESH_S = 1.0
"""To a reaper that just started, a period is fresh for at least this long: it vouches for none of it."""
MAX_PERIODS = 200
"""How many periods the ledger keeps. Older ones are removed once every living worker was heard after them."""
MOST_PERIODS = 2_000
"""How many it keeps at most, if a worker is silent through all of them."""
STEP_BACK_S = 0.1
"""A clock that is behind the last tick by more than this was set back."""


class Cause(StrEnum):
    """Why a watch period began."""

    START = "start"
    """No reaper was in touch with the ledger before."""
    PAUSE = "pause"
    """The reaper was frozen or starved, or its machine slept."""
    OUTAGE = "outage"
    """The reaper could not reach the ledger."""
    FAILOVER = "failover"
    """The database server was restarted, or another one took over."""
    CLOCK = "clock"
    """The ledger's clock went further than the reaper's own: it was set forward, or the database stood still."""


class Period(msgspec.Struct, frozen=True):
    """An interval of the ledger's time in which a reaper kept reaching it."""

    since: float
    until: float


class Tick(msgspec.Struct, frozen=True):
    """What a reaper says of itself when it reaches the ledger."""

    claim_s: float | None
    """How long it was awake and in touch, reaching back to the last tick it knows of; None if it cannot say."""
    every_s: float
    """How often it ticks."""
    slack_s: float = MOST_SLACK_S
    """How much a tick may be delayed on its way to the ledger before the time in between is in doubt."""
    cause: Cause | None = None
    """Why it cannot claim more, as far as it knows."""
    since_s: float | None = None
    """How long ago it last reached the ledger, by its own clock; None if it cannot say."""
    seen_at: float | None = None
    """What the ledger's clock said then."""

    def overtaken(self, now: float) -> bool:
        """Return whether the ledger's clock went further than the reaper's own since their last contact.

        Then it was set forward, or the tick was long on its way. The claim says nothing about the ledger's time: others
        may have counted the same moments already, by the clock as it was."""
        if self.since_s is None or self.seen_at is None:
            return False
        return now - self.seen_at > self.since_s + self.slack_s


class Keep(msgspec.Struct, frozen=True):
    """Others keep the watch: change nothing."""


class Extend(msgspec.Struct, frozen=True):
    """Extend the current period to now."""


class Begin(msgspec.Struct, frozen=True):
    """Begin a new period, because of `cause`."""

    since: float
    cause: Cause


class SetBack(msgspec.Struct, frozen=True):
    """The clock was set back by `step_s`: move all periods and heartbeats with it, and go on.

    With a `cause` in a new period: more happened than that, and no one knows how long it took."""

    step_s: float
    cause: Cause | None = None


Change = Keep | Extend | Begin | SetBack


def advance(last: Period | None, now: float, tick: Tick, *, same_server: bool = True) -> Change:
    """Decide what a tick does to the watch periods; `last` is the current one."""
    claim_s = 0.0 if tick.claim_s is not None and tick.overtaken(now) else tick.claim_s
    if last is None:
        return Begin(now - (claim_s or 0.0), tick.cause or Cause.START)
    if now < last.until - STEP_BACK_S:
        return SetBack(last.until - now, tick.cause if same_server else Cause.FAILOVER)
    if not same_server:
        return Begin(now, Cause.FAILOVER)
    if claim_s is not None and now - claim_s <= last.until + tick.slack_s:
        return Extend()
    fresh_s = FRESH_INTERVALS * tick.every_s
    if now - last.until <= (max(fresh_s, FRESH_S) if claim_s is None else fresh_s):
        return Keep()
    if claim_s is None:
        return Begin(now, tick.cause or Cause.START)
    if tick.cause is None:
        # The reaper was on time, and the ledger says that it is late. The tick may have been on its way all that time.
        return Begin(now, Cause.CLOCK)
    return Begin(now - claim_s, tick.cause)


def slack_s(interval_s: float) -> float:
    """Return how late a tick may reach the ledger in a fleet whose quickest worker beats every `interval_s`."""
    return min(MOST_SLACK_S, max(LEAST_SLACK_S, interval_s / 2))


def watched_s(periods: Sequence[Period], since: float) -> float:
    """Return how much of the time after `since` was watched."""
    return sum(max(0.0, period.until - max(period.since, since)) for period in periods)


def grace_s(timeout_s: float, interval_s: float) -> float:
    """Return how long living workers are given to be heard again after a watch period began."""
    return min(timeout_s, 1.5 * interval_s + 2.0)
