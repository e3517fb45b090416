"""Ask where a running job stands: its worker has the stack noted and tells it as an event."""

from unstuck.domain.states import JobState
from unstuck.store.contract import Ledger
from unstuck.store.records import JobRecord


def ask_stack(ledger: Ledger, job: JobRecord) -> bool:
    """Ring the worker that runs this job; False where nobody runs it.

    Best effort like every ring: whoever hears nothing may ask again."""
    if job.state is not JobState.RUNNING:
        return False
    ledger.ring({f"stack:{job.worker_id}:{job.id}:{job.token}"})
    return True
