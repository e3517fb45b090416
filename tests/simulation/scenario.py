"""Describe one run completely, and draw it from a seed. A scenario is data: it is stored, replayed and made smaller."""

import math
import random
from typing import Literal

import msgspec
from tests.simulation.database import Shape

from unstuck.config import Recovery
from unstuck.domain.policy import Policy, check_policy
from unstuck.domain.retry import RetryRule
from unstuck.ledger.postgres.connect import ANSWER_GRACE_S, LEAST_STATEMENT_S, MOST_SERVICE_STATEMENT_S

Ends = Literal["well", "raises", "kills"]
"""What user code does in the end: return, raise, or take its process with it."""

FAULTS_OF_ALL = (
    "crash",
    "freeze",
    "freeze machine",
    "pause reaper",
    "runner dies",
    "deploy",
    "slow calls",
    "error before commit",
    "error after commit",
    "hung calls",
    "outage",
    "read-only",
    "user lock",
    "clock step",
)
FAULTS_OF_FILES = ("reboot",)
FAULTS_OF_SERVERS = (
    "cut both ways",
    "cut to the server",
    "cut from the server",
    "cut a machine",
    "hung server",
    "server restart",
    "failover",
    "failover with lag",
    "server clock step",
    "connection limit",
)
FAULTS = FAULTS_OF_ALL + FAULTS_OF_FILES + FAULTS_OF_SERVERS
MAY_LAST = frozenset({"crash", "freeze", "freeze machine", "pause reaper", "cut both ways", "hung calls"})
"""Faults that may stay until the end of the run, where everything is healed."""


class JobPlan(msgspec.Struct, frozen=True):
    at_s: float
    runs_s: float
    ends: Ends
    policy: Policy
    delay_s: float = 0.0


class WorkerPlan(msgspec.Struct, frozen=True):
    machine: int
    slots: int
    reaps: bool


class Fault(msgspec.Struct, frozen=True):
    kind: str
    at_s: float
    for_s: float | None
    """None: until everything is healed."""
    whom: int = 0
    """Chooses the worker, machine or reaper, by its number modulo how many there are."""
    size: float = 0.0
    """How far a clock steps, how much a standby lags, how often calls fail: by the kind."""

    @property
    def until_s(self) -> float:
        return self.at_s + (self.for_s or 0.0)

    def __str__(self) -> str:
        lasting = "for ever" if self.for_s is None else f"for {self.for_s:.2f}s"
        return f"{self.kind} at {self.at_s:.2f}s {lasting} (whom {self.whom}, size {self.size:.3g})"


class Scenario(msgspec.Struct, frozen=True):
    seed: int
    shape: Shape
    interval_s: float
    timeout_s: float
    claimed_stale_after_s: float | None
    running_stale_after_s: float | None
    check_interval_s: float
    session_grace_s: float
    evidence: tuple[str, ...]
    auto_requeue: bool
    auto_fail: bool
    machines: int
    containers: bool
    """Each worker has a boot id and a name of its own, as in a container."""
    workers: tuple[WorkerPlan, ...]
    reapers: int
    """How many run alone, outside any worker."""
    schedule_every_s: float | None
    deadline_s: float
    latency_s: float
    poll_s: float
    pooled: bool
    late_share: float
    """How often a call that nobody waits for any more is delivered when its road is mended."""
    keepalive_s: float
    """After how long a server gives up a session whose road is cut: 13 s at the earliest, by our own settings."""
    jobs: tuple[JobPlan, ...]
    faults: tuple[Fault, ...]

    def recovery(self) -> Recovery:
        return Recovery(
            heartbeat_interval=self.interval_s,
            heartbeat_timeout=self.timeout_s,
            claimed_stale_after=self.claimed_stale_after_s,
            running_stale_after=self.running_stale_after_s,
            check_interval=self.check_interval_s,
            session_grace=self.session_grace_s,
            evidence=self.evidence,
            auto_requeue_stale_claimed=self.auto_requeue,
            auto_fail_stale_running=self.auto_fail,
            auto_disable_unhealthy=False,
        )

    @property
    def longest_s(self) -> float:
        """The longest time for which anybody may be silent before it is declared dead."""
        own = [plan.policy.heartbeat_timeout_s or 0.0 for plan in self.jobs]
        return max(self.timeout_s, self.claimed_stale_after_s or 0.0, self.running_stale_after_s or 0.0, *own, 0.0)

    @property
    def quiet_s(self) -> float:
        """When the last fault that ends by itself is over, and the last job was enqueued."""
        return max([fault.until_s for fault in self.faults] + [plan.at_s for plan in self.jobs] + [0.0])


def draw(seed: int, only: Shape | None = None) -> Scenario:
    """Draw a scenario, of this shape only if one is given; every setting is one that our own checks accept."""
    chance = random.Random(seed)
    drawn: Shape = "server" if chance.random() < 0.65 else "file"
    shape = only or drawn
    # The defaults often: some evidence counts in seconds, and means nothing to a fleet that is quicker than that.
    timeout_s = 30.0 if chance.random() < 0.3 else _rounded(math.exp(chance.uniform(math.log(2.0), math.log(40.0))))
    # Rounded down: the longest interval that is allowed is exactly half of the timeout.
    interval_s = math.floor(timeout_s * chance.choice((0.5, 0.5, 0.4, 1 / 3, 1 / 6, 1 / 6, 0.1)) * 1e4) / 1e4
    check_s = _rounded(timeout_s * chance.choice((0.03, 0.1, 0.1, 0.25, 0.5)))
    claimed_s = chance.choice((None, None, None, 2.0, 3.0, 8.0))
    running_s = chance.choice((None, None, None, 2.0, 3.0, 8.0))
    machines = 1 if shape == "file" else chance.choice((1, 2, 3, 3))
    workers = tuple(
        WorkerPlan(number % machines, chance.randint(1, 3), chance.random() < 0.8)
        for number in range(chance.randint(1, 4))
    )
    reapers = chance.choice((0, 0, 1)) if any(worker.reaps for worker in workers) else 1
    scenario = Scenario(
        seed=seed,
        shape=shape,
        interval_s=interval_s,
        timeout_s=timeout_s,
        claimed_stale_after_s=None if claimed_s is None else _rounded(claimed_s * interval_s),
        running_stale_after_s=None if running_s is None else _rounded(running_s * interval_s),
        check_interval_s=check_s,
        session_grace_s=_rounded(chance.choice((0.0, 0.5, 2.0, 2.0, 2.0, 5.0))),
        evidence=chance.choice((("neighbours", "session"), ("neighbours", "session"), ("session",), ())),
        auto_requeue=chance.random() < 0.97,
        auto_fail=chance.random() < 0.97,
        machines=machines,
        containers=chance.random() < 0.3,
        workers=workers,
        reapers=reapers,
        schedule_every_s=chance.choice((None, None, _rounded(max(1.0, timeout_s / 2)))),
        deadline_s=_rounded(_deadline_s(chance, interval_s) if shape == "server" else 30.0),
        latency_s=chance.choice((0.0005, 0.002, 0.02)),
        poll_s=_rounded(chance.uniform(0.1, 0.5) * timeout_s),
        pooled=shape == "server" and chance.random() < 0.15,
        late_share=chance.choice((0.0, 0.5)),
        keepalive_s=chance.choice((13.0, 13.0, 15.0, 20.0)),
        jobs=_draw_jobs(chance, timeout_s, interval_s),
        faults=(),
    )
    scenario.recovery()
    return msgspec.structs.replace(scenario, faults=_draw_faults(chance, scenario))


def _deadline_s(chance: random.Random, interval_s: float) -> float:
    """Return how long a call may take: what our connections allow themselves, or a little else."""
    ours_s = min(max(LEAST_STATEMENT_S, interval_s / 2), MOST_SERVICE_STATEMENT_S) + ANSWER_GRACE_S
    return chance.choice((ours_s, ours_s, 3.0, 10.0))


def _draw_jobs(chance: random.Random, timeout_s: float, interval_s: float) -> tuple[JobPlan, ...]:
    plans = []
    for _ in range(chance.randint(2, 8)):
        runs_s = _rounded(timeout_s * chance.choice((0.02, 0.1, 0.5, 1.2)) * chance.uniform(0.5, 1.5))
        plans.append(
            JobPlan(
                at_s=_rounded(chance.uniform(0.0, 2.5 * timeout_s)),
                runs_s=runs_s,
                ends=chance.choices(("well", "raises", "kills"), (10, 1, 1))[0],
                policy=_draw_policy(chance, timeout_s, interval_s, runs_s),
                delay_s=_rounded(chance.choice((0.0, 0.0, 0.0, chance.uniform(0.0, timeout_s)))),
            )
        )
    return tuple(sorted(plans, key=lambda plan: plan.at_s))


def _draw_policy(chance: random.Random, timeout_s: float, interval_s: float, runs_s: float) -> Policy:
    heartbeat = chance.random() < 0.95
    own = chance.random() < 0.15
    limited = not heartbeat or chance.random() < 0.1
    policy = Policy(
        retry=RetryRule(max_attempts=chance.choice((1, 1, 3)), delay_s=0.2),
        on_crash=chance.choice(("fail", "retry")),
        max_crash_retries=chance.choice((0, 1, 3)),
        timeout_s=_rounded(chance.choice((0.5, 3.0)) * runs_s + 1.0) if limited else None,
        heartbeat=heartbeat,
        heartbeat_timeout_s=_rounded(chance.choice((2.0, 3.0, 10.0)) * interval_s) if own and heartbeat else None,
        overlap=chance.choice(("bounded", "bounded", "never")),
    )
    check_policy("t", policy, app_interval_s=interval_s, app_timeout_s=timeout_s)
    return policy


def _draw_faults(chance: random.Random, scenario: Scenario) -> tuple[Fault, ...]:
    kinds = FAULTS_OF_ALL + (FAULTS_OF_FILES if scenario.shape == "file" else FAULTS_OF_SERVERS)
    timeout_s = scenario.timeout_s
    faults = []
    for _ in range(chance.randint(1, 5)):
        kind = chance.choice(kinds)
        lasts = kind in MAY_LAST and chance.random() < 0.4
        share = chance.choice((0.05, 0.3, 0.6, 0.9, 1.3, 2.5))
        for_s = None if lasts else _rounded(timeout_s * share * chance.uniform(0.7, 1.3))
        if kind.startswith("failover") and chance.random() < 0.6:
            # As quick as a cluster manager is, in seconds: some evidence counts in seconds too.
            for_s = _rounded(chance.uniform(0.5, 8.0))
        whom, at_s = chance.randrange(12), _rounded(chance.uniform(0.1, 3.0) * timeout_s)
        faults.append(Fault(kind, at_s, for_s, whom, _draw_size(chance, kind, timeout_s)))
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def _draw_size(chance: random.Random, kind: str, timeout_s: float) -> float:
    match kind:
        case "clock step" | "server clock step":
            return chance.choice((-3600.0, -timeout_s, -1.0, 1.0, timeout_s, 3600.0)) * chance.uniform(0.8, 1.2)
        case "failover with lag":
            return chance.choice((0.05, 0.3, 1.0)) * timeout_s
        case "error before commit" | "error after commit":
            return chance.choice((0.1, 0.5, 1.0))
        case "slow calls":
            return chance.choice((10.0, 100.0))
        case _:
            return 0.0


def _rounded(value_s: float) -> float:
    return round(value_s, 4)
