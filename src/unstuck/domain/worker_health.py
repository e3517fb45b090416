"""Decide how far a worker is to be trusted, from the deaths that happened in its hands.

A weight grows with each death and fades with time and with work done well. The present weight says how late and how
much a worker claims. Whether one is switched off is decided by comparison: where everybody's runners die it is the
jobs, and to switch off workers one after the other would cure nothing.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from unstuck.domain.recovery_rules import RecoveryRules
from unstuck.domain.retry import EXCUSED_MAX_S
from unstuck.domain.states import WorkerState

HALF_LIFE_S = 600.0
HEALED_BY_A_JOB = 0.98
"""What one job that ended without a death leaves of the weight: below one death in ten jobs it stays small."""
FIRST_DEATH = 1.0
REPEATED_DEATH = 0.1
"""A job that died before is most likely killed by itself, wherever it runs."""
SAME_MOMENT_S = 0.25
"""Deaths so close together have one cause, and count as one: a shared loop, a fork server, a full memory."""
FORGOTTEN_BELOW = 0.05
BAD_LUCK = 1.5
"""Up to this weight nothing changes."""
IN_A_ROW = 3
"""From this many different jobs on that died one after the other, with none that ended otherwise in between, their
deaths are the worker's doing and not theirs."""
ROW_KEPT_S = 2 * EXCUSED_MAX_S
"""A row without another death for this long is forgotten; jobs that are excused wait for at most half of it."""
SURVIVED_S = 5.0
"""Another job that has run for this long beside the dead shows that the worker does not kill everything."""
FIRST_PROBE_S = 0.5
LONGEST_PROBE_S = 5.0
"""Pauses between the jobs that such a worker still tries, one at a time."""
DISABLE_IN_A_ROW = 4
DISABLE_IN_A_ROW_DEATHS = 2
"""A worker under which this many different jobs died in a row is switched off after this many moments of death."""
DISABLE_AT = 5.0
DISABLE_FROM_JOBS = 5
"""Number of different jobs that must have died there."""
CLEARLY_HEALTHIER = 0.5
"""Who stands in must have at most this share of the weight: else it is the jobs, and not the worker."""
LONGEST_DELAY_S = 1.0
DELAY_PER_WEIGHT_S = 0.25
RECENT_S = 3 * HALF_LIFE_S
MAX_JOBS_KEPT = 50
MAX_GUILTY_KEPT = 1000


class Disabled(msgspec.Struct, frozen=True):
    """By whom a worker or a host was disabled, when and why."""

    reason: str
    by: str
    at: float
    """Seconds since 1970, by the ledger's clock."""
    auto: bool = False
    """The reaper did it, and may take it back where nobody else is left."""
    of_host: bool = False
    """Its whole host is switched off."""


class Health(msgspec.Struct, frozen=True):
    """What a worker says of itself: its weight as it is now, and what it rests on."""

    weight: float = 0.0
    deaths: int = 0
    """Recent ones; those of the same moment count as one."""
    jobs: int = 0
    """How many different jobs died in them."""
    score: float = 1.0
    """The same for people: from 1 (well) towards 0. At 0.5 a worker may be switched off."""
    in_a_row: int = 0
    """How many different jobs died since one ended otherwise."""


def read_health(said: Any) -> Health:
    """Understand what a worker said of itself; whoever says something else is taken for well."""
    try:
        return msgspec.convert(said, Health) if said is not None else Health()
    except msgspec.ValidationError:
        return Health()


class Standing(msgspec.Struct, frozen=True):
    """A living worker as the judgement of health sees it."""

    id: str
    name: str
    host: str
    state: WorkerState
    queues: tuple[str, ...]
    tasks: tuple[str, ...]
    health: Health
    disabled: Disabled | None
    """Its own, or that of its host."""
    leaving: bool
    """An operator asked it to drain or to stop."""
    well: bool
    """It beat within its timeout."""
    rules: RecoveryRules | None = None
    """The recovery settings that it stored."""

    @property
    def may_be_disabled(self) -> bool:
        """Whether a reaper may switch it off by itself (`auto_disable_unhealthy`)."""
        return self.rules is None or self.rules.auto_disable_unhealthy

    @property
    def serving(self) -> bool:
        return self.state is WorkerState.ACTIVE and self.well and self.disabled is None and not self.leaving


# Weights --------------------------------------------------------------------------------------


def faded(weight: float, elapsed_s: float, jobs: int = 0) -> float:
    """Give what time and jobs done well leave of a weight."""
    left = weight * 0.5 ** (max(0.0, elapsed_s) / HALF_LIFE_S) * HEALED_BY_A_JOB ** max(0, jobs)
    return left if left >= FORGOTTEN_BELOW else 0.0


def blame(crashes: int, suspected_crashes: int, *, at_fault: bool = False) -> float:
    """Return what the death of a job adds to the weight of its worker; the counters are those of before it.

    A job that died before is most likely killed by itself, unless everything dies here (`at_fault`)."""
    return FIRST_DEATH if at_fault or crashes + suspected_crashes == 0 else REPEATED_DEATH


def score(weight: float) -> float:
    return DISABLE_AT / (DISABLE_AT + weight)


# Claiming -------------------------------------------------------------------------------------


def delay_s(weight: float) -> float:
    """Give how long a worker lets others go first before it claims; bounded, so that it always comes back."""
    if weight <= BAD_LUCK:
        return 0.0
    return min(LONGEST_DELAY_S, DELAY_PER_WEIGHT_S * (weight - 1.0))


def usable_slots(weight: float, slots: int, *, at_fault: bool = False) -> int:
    """Return how many of its slots a worker may fill: never none, since only work can show that it is well again."""
    if at_fault:
        return 1
    return slots if weight <= BAD_LUCK else max(1, math.ceil(slots * score(weight)))


def probe_delay_s(probes: int) -> float:
    """Return how long a worker under which everything dies waits before it tries another job; `probes` died already."""
    return min(LONGEST_PROBE_S, FIRST_PROBE_S * 2.0 ** min(probes, 10))


# Switching off --------------------------------------------------------------------------------


def should_disable(worker: Standing, fleet: Iterable[Standing]) -> str | None:
    """Give the reason to switch a worker off; None where there is none, or where nobody could stand in for it."""
    health = worker.health
    everything_dies = health.in_a_row >= DISABLE_IN_A_ROW and health.deaths >= DISABLE_IN_A_ROW_DEATHS
    often = health.jobs >= DISABLE_FROM_JOBS and health.weight >= DISABLE_AT
    if not (worker.may_be_disabled and worker.serving and (everything_dies or often)):
        return None
    bound = CLEARLY_HEALTHIER * health.weight
    others = [other for other in fleet if other.id != worker.id and other.health.weight <= bound]
    if not _all_served(worker, others):
        return None
    how = ", all in a row" if everything_dies else " lately"
    return (
        f"its runners keep dying: {health.jobs} different jobs{how} (score {score(health.weight):.2f}), "
        "while others that serve the same queues are well"
    )


def should_enable(worker: Standing, fleet: Iterable[Standing]) -> str | None:
    """Give the reason to take back what the reaper switched off: nobody else is left for one of its queues."""
    if worker.disabled is None or not worker.disabled.auto or worker.leaving:
        return None
    # A suspect that beat within its timeout may be back in a moment: it counts as somebody here, and as nobody where
    # one is to be switched off. A silent one may stay suspect for hours, for a job that asked for so much patience.
    others = [other for other in fleet if other.id != worker.id and _may_serve(other)]
    for queue in worker.queues:
        if not any(_stands_in(other, worker, queue) for other in others):
            return f"nobody else is left to serve queue {queue!r}"
    return None


def _all_served(worker: Standing, others: Sequence[Standing]) -> bool:
    serving = [other for other in others if other.serving]
    return all(any(_stands_in(other, worker, queue) for other in serving) for queue in worker.queues)


def _stands_in(other: Standing, worker: Standing, queue: str) -> bool:
    return queue in other.queues and set(worker.tasks) <= set(other.tasks)


def _may_serve(worker: Standing) -> bool:
    there = worker.state is WorkerState.ACTIVE or (worker.state is WorkerState.SUSPECT and worker.well)
    return there and worker.disabled is None and not worker.leaving
