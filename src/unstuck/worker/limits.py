"""Say which limit of its task a running job has broken, and when to look at it again. Pure."""

import math
from typing import NamedTuple

from unstuck.domain.autopsy import DeathKind
from unstuck.domain.durations import brief
from unstuck.domain.errors import ErrorCode
from unstuck.domain.outcomes import Died, Outcome, Overran, Stalled
from unstuck.domain.sizes import brief_size
from unstuck.worker.holds import Hold

WEIGH_S = 1.0
"""How often a process is weighed for its autopsy alone."""
WEIGH_LIMITED_S = 0.2
WEIGH_NEAR_S = 0.025
"""The same where the task has a `memory_limit`, and where half of it is used: growth is fast."""


class Moments(NamedTuple):
    """From when on each limit of a job counts."""

    began_s: float
    signed_s: float
    """Its last sign, or when it began."""
    pulse_s: float
    """The last pulse of its interpreter, or when it began."""


def broken(hold: Hold, since: Moments, now_s: float, memory_bytes: int) -> tuple[Outcome, DeathKind] | None:
    """Give what becomes of a job that broke a limit, and which one; None for one that keeps them all."""
    policy = hold.policy
    if policy.timeout_s is not None and now_s - since.began_s > policy.timeout_s:
        return Overran(f"ran longer than its timeout of {policy.timeout_s:g}s"), DeathKind.DEADLINE
    if policy.memory_limit_bytes is not None and memory_bytes > policy.memory_limit_bytes:
        cause = f"used {brief_size(memory_bytes)}, over its memory_limit of {brief_size(policy.memory_limit_bytes)}"
        return Died(cause, ErrorCode.OUT_OF_MEMORY), DeathKind.MEMORY_LIMIT
    if policy.stall_timeout_s is not None:
        silent_s = now_s - since.signed_s
        if silent_s > policy.stall_timeout_s:
            return Stalled(_stall(hold, silent_s)), DeathKind.STALL
    if policy.interpreter_timeout_s is not None:
        silent_s = now_s - since.pulse_s
        if silent_s > policy.interpreter_timeout_s:
            cause = (
                f"no Python code ran in its process for {brief(silent_s)}, longer than its interpreter_timeout of "
                f"{brief(policy.interpreter_timeout_s)}"
            )
            return Stalled(cause), DeathKind.INTERPRETER
    return None


def look_again_s(hold: Hold, since: Moments) -> float:
    """Give when this job may break a limit of time at the earliest."""
    policy = hold.policy
    ends = (
        math.inf if policy.timeout_s is None else since.began_s + policy.timeout_s,
        math.inf if policy.stall_timeout_s is None else since.signed_s + policy.stall_timeout_s,
        math.inf if policy.interpreter_timeout_s is None else since.pulse_s + policy.interpreter_timeout_s,
    )
    return min(ends)


def weigh_again_s(limit_bytes: int | None, memory_bytes: int) -> float:
    """Give how long to wait before a process is weighed again."""
    if limit_bytes is None:
        return WEIGH_S
    return WEIGH_NEAR_S if 2 * memory_bytes > limit_bytes else WEIGH_LIMITED_S


def on_the_beat(at_s: float, grid_s: float) -> float:
    """Give the next moment of a common beat: many runners are looked at in one go, and not one by one."""
    return math.ceil(at_s / grid_s) * grid_s


def _stall(hold: Hold, silent_s: float) -> str:
    limit = brief(hold.policy.stall_timeout_s or 0.0)
    if not hold.signed_s:
        return f"gave no sign in the {brief(silent_s)} since it began (stall_timeout {limit}): call ctx.heartbeat()"
    return f"gave no sign for {brief(silent_s)}, longer than its stall_timeout of {limit}"
