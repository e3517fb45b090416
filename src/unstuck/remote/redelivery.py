"""Hand out once more what somebody holds: the answer that gave it was lost, or whoever got it has forgotten."""

from unstuck.domain.states import JobState
from unstuck.ledger.contract.jobs import JobRecord
from unstuck.ledger.contract.workers import Claimed, HeldRecord


def claimed_again(held: HeldRecord, record: JobRecord) -> Claimed:
    """Give a job in somebody's hands as its claim gave it."""
    running = held.state is JobState.RUNNING
    return Claimed(
        job_id=held.job_id,
        token=held.token,
        task=held.task,
        queue=held.queue,
        running=running,
        payload=record.payload,
        payload_type=record.payload_type,
        policy=held.policy,
        failures=held.failures,
        crashes=held.crashes,
        # A try counts from its start.
        attempt=record.attempt + (not running),
    )
