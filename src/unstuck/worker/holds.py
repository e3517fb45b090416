"""A job in this worker's hands, from the claim to the settled end."""

import math
from dataclasses import dataclass, field

from unstuck.domain.autopsy import DeathKind, ProgressMark
from unstuck.domain.outcomes import Outcome
from unstuck.domain.policy import Policy
from unstuck.domain.recovery import Attempt
from unstuck.runner.wire import JobFrame
from unstuck.store.records import Claimed


@dataclass(slots=True, eq=False)
class Stop:
    """Why we end a job ourselves, and how far that has got."""

    fate: Outcome
    """What it becomes when it is really over."""
    kind: DeathKind
    begun_s: float = 0.0
    noting_until_s: float = 0.0
    """So long its stack is waited for, before anything else is done to it; 0: not, or no longer."""
    kill_at_s: float = 0.0
    """When its runner is killed, whatever it does; 0: never by this, somebody else sees to it."""
    tried: list[str] = field(default_factory=list)
    """What was done to end it, in words, for its autopsy."""
    terminated: int = 0


@dataclass(slots=True, eq=False)
class Hold:
    job: Claimed
    policy: Policy
    is_async: bool
    lease_s: float | None
    """How long it may live without a confirmed beat; None: for ever (`heartbeat=False`)."""
    taken_s: float
    """When it came into our hands, or was last waiting for a slot again."""
    given_s: float = 0.0
    """When a runner got it; 0 before."""
    stop: Stop | None = None
    cancel_requested: bool = False
    signed_s: float = 0.0
    """Its last `ctx.heartbeat()` or `ctx.progress()`; 0 before the first."""
    progress: ProgressMark | None = None
    busy_since_s: float = 0.0
    """Since when no Python code ran in its process, where that is long enough to be told; else 0."""
    changed: bool = False
    """Its progress, or its silence, is not told to the ledger yet."""
    unheard_s: float = math.inf
    """How long its worker may be silent before it is suspect."""
    writing: int = 0
    """So many of its entries wait to be written: it waits for the ledger, and is not stalled."""

    @property
    def token(self) -> int:
        return self.job.token

    @property
    def retried_elsewhere(self) -> bool:
        return self.policy.on_crash == "retry"

    @property
    def alone(self) -> bool:
        """It may have killed a process that it shared: it gets one of its own. A sync job always does."""
        return self.is_async and self.job.alone

    def attempt(self) -> Attempt:
        job = self.job
        return Attempt(
            job.job_id, job.token, self.policy, job.failures, job.crashes, self.cancel_requested, job.suspicions
        )

    def frame(self) -> JobFrame:
        job = self.job
        facts = (job.token, job.job_id, job.task, job.queue, job.payload, job.payload_type, job.attempt, job.crashes)
        return JobFrame(*facts, job.inputs, job.journal)
