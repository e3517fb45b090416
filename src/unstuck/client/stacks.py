"""Ask where a running job stands: its worker has the stack noted and tells it as an event."""

import time

from unstuck.domain.events import EventKind
from unstuck.domain.states import JobState
from unstuck.store.contract import Ledger
from unstuck.store.records import EventRecord, JobRecord

LOOK_S = 0.05
ASK_AGAIN_S = 2.0
"""A ring may be lost."""


def ask_stack(ledger: Ledger, job: JobRecord) -> bool:
    """Ring the worker that runs this job; False where nobody runs it.

    Best effort like every ring: whoever hears nothing may ask again."""
    if job.state is not JobState.RUNNING:
        return False
    ledger.ring({f"stack:{job.worker_id}:{job.id}:{job.token}"})
    return True


def fetch_stack(ledger: Ledger, job_id: int, patience_s: float) -> EventRecord | None:
    """Ask where a job stands and wait for the answer; None where it does not run, or nobody answers in time."""
    before = ledger.events(job_id=job_id, limit=1)
    after_id = before[-1].id if before else 0
    deadline_s, ask_at_s = time.monotonic() + patience_s, 0.0
    while (now_s := time.monotonic()) < deadline_s:
        if now_s >= ask_at_s:
            ask_at_s = now_s + ASK_AGAIN_S
            job = ledger.job(job_id)
            if job is None or not ask_stack(ledger, job):
                return None
        time.sleep(LOOK_S)
        for event in ledger.events(job_id=job_id, after_id=after_id):
            if event.kind == EventKind.STACK:
                return event
    return None
