"""A job in this worker's hands, from the claim to the settled end."""

from dataclasses import dataclass

from unstuck.domain.outcomes import Outcome
from unstuck.domain.policy import Policy
from unstuck.domain.recovery import Attempt
from unstuck.runner.wire import JobFrame
from unstuck.store.records import Claimed


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
    fate: Outcome | None = None
    """What it becomes when its runner is gone, where we decided that ourselves (deadline, cancel, drain)."""
    stop_by_s: float = 0.0
    """An async job was asked to stop: if it did not by then, its runner is killed."""
    cancel_requested: bool = False

    @property
    def token(self) -> int:
        return self.job.token

    @property
    def retried_elsewhere(self) -> bool:
        return self.policy.on_crash == "retry"

    def attempt(self) -> Attempt:
        job = self.job
        return Attempt(
            job.job_id, job.token, self.policy, job.failures, job.crashes, self.cancel_requested, job.suspicions
        )

    def frame(self) -> JobFrame:
        job = self.job
        return JobFrame(
            job.token, job.job_id, job.task, job.queue, job.payload, job.payload_type, job.attempt, job.crashes
        )
