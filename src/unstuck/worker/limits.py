"""Decide which limit a running job has broken, and when to look at it again. Pure."""

import math
from collections import deque
from typing import NamedTuple

from unstuck.domain.autopsy import DeathKind
from unstuck.domain.endings import Died, Outcome, Overran, Stalled
from unstuck.domain.units import brief, brief_size
from unstuck.errors import ErrorCode
from unstuck.worker.held_jobs import HeldJob

MEASURE_S = 1.0
"""How often a process is weighed for its autopsy alone."""
MEASURE_LIMITED_S = 0.2
MEASURE_NEAR_S = 0.025
"""The same where the task has a `memory_limit`, and where half of it is used: growth is fast."""


class Moments(NamedTuple):
    """From when on each limit of a job counts."""

    began_s: float
    last_heartbeat_s: float
    """Its last sign, or when it began."""
    pulse_s: float
    """The last pulse of its interpreter, or when it began."""


def broken_limit(
    held_job: HeldJob, since: Moments, now_s: float, memory_bytes: int
) -> tuple[Outcome, DeathKind] | None:
    """Give what becomes of a job that broke a limit, and which one; None for one that keeps them all."""
    policy = held_job.policy
    if policy.timeout_s is not None and now_s - since.began_s > policy.timeout_s:
        return Overran(f"ran longer than its timeout of {policy.timeout_s:g}s"), DeathKind.DEADLINE
    if policy.memory_limit_bytes is not None and memory_bytes > policy.memory_limit_bytes:
        cause = f"used {brief_size(memory_bytes)}, over its memory_limit of {brief_size(policy.memory_limit_bytes)}"
        return Died(cause, ErrorCode.OUT_OF_MEMORY), DeathKind.MEMORY_LIMIT
    if policy.stall_timeout_s is not None:
        silent_s = now_s - since.last_heartbeat_s
        if silent_s > policy.stall_timeout_s:
            return Stalled(_stall(held_job, silent_s)), DeathKind.STALL
    if policy.interpreter_timeout_s is not None:
        silent_s = now_s - since.pulse_s
        if silent_s > policy.interpreter_timeout_s:
            cause = (
                f"no Python code ran in its process for {brief(silent_s)}, longer than its interpreter_timeout of "
                f"{brief(policy.interpreter_timeout_s)}"
            )
            return Stalled(cause), DeathKind.INTERPRETER
    return None


def look_again_s(held_job: HeldJob, since: Moments) -> float:
    """Give when this job may break a limit of time at the earliest."""
    policy = held_job.policy
    ends = (
        math.inf if policy.timeout_s is None else since.began_s + policy.timeout_s,
        math.inf if policy.stall_timeout_s is None else since.last_heartbeat_s + policy.stall_timeout_s,
        math.inf if policy.interpreter_timeout_s is None else since.pulse_s + policy.interpreter_timeout_s,
    )
    return min(ends)


def measure_again_s(limit_bytes: int | None, memory_bytes: int) -> float:
    """Give how long to wait before a process is weighed again."""
    if limit_bytes is None:
        return MEASURE_S
    return MEASURE_NEAR_S if 2 * memory_bytes > limit_bytes else MEASURE_LIMITED_S


def next_grid_time(at_s: float, grid_s: float) -> float:
    """Round a time up to a multiple of `grid_s`, so that many runners are checked at the same moment."""
    return math.ceil(at_s / grid_s) * grid_s


def _stall(held_job: HeldJob, silent_s: float) -> str:
    limit = brief(held_job.policy.stall_timeout_s or 0.0)
    if not held_job.last_heartbeat_s:
        return f"gave no sign in the {brief(silent_s)} since it began (stall_timeout {limit}): call ctx.heartbeat()"
    return f"gave no sign for {brief(silent_s)}, longer than its stall_timeout of {limit}"


MARGIN_SHARE = 0.1
MAX_MARGIN_S = 2.0


def lease_end_s(confirmed_s: float, timeout_s: float) -> float:
    """Give the end of a lease on our own clock.

    It counts from when the last confirmed beat was *sent*: the ledger wrote it later than that, and so
    takes the job away later than we give it up.
    """
    return confirmed_s + timeout_s - min(MAX_MARGIN_S, MARGIN_SHARE * timeout_s)


def may_begin(held_job: HeldJob, confirmed_s: float, now_s: float) -> bool:
    """Say whether user code may begin now: not after the lease, when the job may be somebody else's.

    This holds for every policy: what has not begun costs nothing to give back."""
    return held_job.lease_s is None or now_s < lease_end_s(confirmed_s, held_job.lease_s)


def must_stop_at_s(held_job: HeldJob, confirmed_s: float) -> float | None:
    """Give when this job must be stopped unless a beat is confirmed; None where it may go on.

    A job that would fail, not be retried, goes on: nobody else will take it, and it settles if its token
    still stands. One that is past its deadline is ended by a reaper as soon as its worker is suspect, and may be
    retried then, whatever its `on_crash` says. On an event loop it shares a process, and is left to its worker.
    """
    ends = []
    if held_job.lease_s is not None and held_job.retries_on_crash:
        ends.append(lease_end_s(confirmed_s, held_job.lease_s))
    timeout_s = held_job.policy.timeout_s
    if timeout_s is not None and held_job.sent_s and not held_job.is_async:
        ends.append(max(held_job.sent_s + timeout_s, lease_end_s(confirmed_s, held_job.unheard_s)))
    return min(ends, default=None)


LATE_S = 0.5
"""The floor looks far more often while jobs run. Who looks so late was frozen, asleep or starved, as jobs may be."""
MAX_PAUSES = 32


class OwnPauses:
    def __init__(self, now_s: float) -> None:
        self._looked_s = now_s
        self._pauses: deque[tuple[float, float]] = deque(maxlen=MAX_PAUSES)

    def look(self, now_s: float) -> None:
        """To be called with every round of the floor."""
        if now_s - self._looked_s > LATE_S:
            self._pauses.append((self._looked_s, now_s))
        self._looked_s = now_s

    def excuse(self, since_s: float) -> float:
        """Give the moment from which to count instead of `since_s`: later by as long as we stood still after it."""
        if not self._pauses or self._pauses[-1][1] <= since_s:
            return since_s
        return since_s + sum(max(0.0, end_s - max(begin_s, since_s)) for begin_s, end_s in self._pauses)
