"""Find steps of the ledger's clock, and times in which no reaper could keep watch over the workers."""

from collections.abc import Iterator

import msgspec

from unstuck.client.doctor.codes import Code
from unstuck.client.doctor.facts import Facts, Limits
from unstuck.client.doctor.finding import Finding, info, warning
from unstuck.domain.durations import brief
from unstuck.domain.watch import Cause
from unstuck.store.diagnosis import Diagnosis, WatchLook

MAX_STEPS = 10
"""How many steps are listed in the facts."""
LONGEST_STILL_S = 60.0
"""Every call to the database has a deadline below this: if more time is missing, the database did not stand still."""

_WHY = {
    Cause.OUTAGE: "The ledger could not be reached",
    Cause.FAILOVER: "The database server was restarted, or another one took over",
    Cause.PAUSE: "The reaper was paused (a frozen process or a sleeping machine), and no other one kept watch",
}
_CURES = {
    Cause.OUTAGE: "If you do not know of it, look at the logs of the database and of the network.",
    Cause.FAILOVER: "If you do not know of it, look at the log of the database server.",
    Cause.PAUSE: "If it happens often, look at the load of the hosts that run workers, or start `unstuck reaper`.",
}


class _Step(msgspec.Struct, frozen=True):
    step_s: float
    """Above zero: forward."""
    ago_s: float


def check_watch(_facts: Facts, diagnosis: Diagnosis, limits: Limits) -> Iterator[Finding]:
    steps = [
        step
        for period in diagnosis.watch
        for step in _steps(period, diagnosis.now_at)
        if abs(step.step_s) > limits.clock_s and step.ago_s <= limits.recent_s
    ]
    if steps:
        yield _stepped(steps, limits)
    for cause in _WHY:
        breaks = [
            period
            for period in diagnosis.watch
            if period.cause is cause and diagnosis.now_at - period.since_at <= limits.recent_s
        ]
        if breaks:
            yield _unwatched(cause, breaks, diagnosis.now_at)


def _steps(period: WatchLook, now_at: float) -> Iterator[_Step]:
    """Return the steps of the clock in a period, the newest first."""
    if period.set_back_s is not None and period.set_back_at is not None:
        yield _Step(-period.set_back_s, max(0.0, now_at - period.set_back_at))
    if period.cause is Cause.CLOCK and period.gap_s is not None:
        yield _Step(period.gap_s, max(0.0, now_at - period.since_at))


def _stepped(steps: list[_Step], limits: Limits) -> Finding:
    worst = max(steps, key=lambda step: abs(step.step_s))
    size = "about " + brief(abs(worst.step_s))
    if worst.step_s < 0:
        moved = f"was set back by {size}"
    elif worst.step_s > LONGEST_STILL_S:
        moved = f"was set forward by {size}"
    else:
        moved = f"was set forward by {size}, or the database stood still"
    more = f" There were {len(steps)} steps in all." if len(steps) > 1 else ""
    say = warning if abs(worst.step_s) > limits.large_step_s else info
    return say(
        Code.CLOCK_STEP,
        f"The ledger's clock {moved}",
        f"That was {brief(worst.ago_s)} ago.{more} No worker loses its lease by it. But `run_at`, `delay`, schedules "
        "and retention go by this clock: after a step forward jobs are early, after a step back they are late.",
        "Let NTP (chrony, systemd-timesyncd) slew the clock of the database's host instead of stepping it. Look at "
        "jobs that were due meanwhile with `unstuck jobs`.",
        step_s=round(worst.step_s, 3),
        ago_s=round(worst.ago_s, 1),
        steps=[
            {"step_s": round(step.step_s, 3), "ago_s": round(step.ago_s, 1)}
            for step in sorted(steps, key=lambda step: step.ago_s)[:MAX_STEPS]
        ],
    )


def _unwatched(cause: Cause, breaks: list[WatchLook], now_at: float) -> Finding:
    gaps_s = [period.gap_s or 0.0 for period in breaks]
    last = breaks[0]
    times = "once" if len(breaks) == 1 else f"{len(breaks):,} times"
    longest = f" The longest was {brief(max(gaps_s))}." if len(breaks) > 1 else ""
    return info(
        Code.LEDGER_OUTAGE,
        f"No one could keep watch over the workers {times} in the last day",
        f"{_WHY[cause]}. The last time ended {brief(max(0.0, now_at - last.since_at))} ago and took "
        f"{brief(max(0.0, gaps_s[0]))}.{longest} This time counts against no worker.",
        _CURES[cause],
        cause=cause.value,
        count=len(breaks),
        last_at=round(last.since_at, 3),
        longest_s=round(max(gaps_s), 3),
        total_s=round(sum(gaps_s), 3),
    )
