"""List the jobs that killed their processes too often, with everything that each of them killed."""

from collections.abc import Iterable

import msgspec

from unstuck.client import views
from unstuck.client.why.endings import brief_cause
from unstuck.domain.states import AttemptState, JobState
from unstuck.store.contract import Ledger
from unstuck.store.records import AttemptRecord, WorkerRecord


class Victim(msgspec.Struct, frozen=True):
    """A process that died while it ran the job."""

    token: int
    at: float | None
    worker: str
    worker_name: str | None
    """None where retention has removed the worker."""
    host: str | None
    kind: str | None
    """What ended it, as one word; None where there is no autopsy."""
    cause: str


class Quarantined(msgspec.Struct, frozen=True):
    """A job that waits for an operator, with the list of what it killed, oldest first."""

    job_id: int
    task: str
    queue: str
    crash_count: int
    enqueued_at: float
    quarantined_at: float | None
    cause: str | None
    victims: tuple[Victim, ...]


def find_quarantined(ledger: Ledger, job_ids: Iterable[int]) -> list[Quarantined]:
    """Give those of these jobs that are quarantined now."""
    workers: dict[str, WorkerRecord] = {}
    found = []
    for job_id in job_ids:
        job = ledger.job(job_id)
        if job is None or job.state is not JobState.QUARANTINED:
            continue
        if not workers:
            workers = {worker.id: worker for worker in ledger.workers()}
        victims = tuple(
            _victim(attempt, workers.get(attempt.worker_id))
            for attempt in ledger.attempts(job_id)
            if attempt.state is AttemptState.CRASHED
        )
        found.append(
            Quarantined(
                job_id=job.id,
                task=job.task,
                queue=job.queue,
                crash_count=job.crash_count,
                enqueued_at=job.enqueued_at,
                quarantined_at=job.finished_at,
                cause=job.error.cause or job.error.shown if job.error is not None else None,
                victims=victims,
            )
        )
    return found


def quarantined_view(job: Quarantined) -> views.View:
    """Give it as plain values, as every door shows them; the fields are a contract: they are only added to."""
    return {
        "id": job.job_id,
        "task": job.task,
        "queue": job.queue,
        "crash_count": job.crash_count,
        "enqueued_at": views.instant(job.enqueued_at),
        "quarantined_at": views.instant(job.quarantined_at),
        "cause": job.cause,
        "victims": [{**msgspec.structs.asdict(victim), "at": views.instant(victim.at)} for victim in job.victims],
    }


def states_of(ledger: Ledger, job_ids: Iterable[int]) -> dict[int, JobState]:
    """Give the states of those jobs that exist."""
    records = (ledger.job(job_id) for job_id in dict.fromkeys(job_ids))
    return {record.id: record.state for record in records if record is not None}


def _victim(attempt: AttemptRecord, worker: WorkerRecord | None) -> Victim:
    autopsy = attempt.autopsy
    host = worker.host if worker is not None else autopsy.host if autopsy is not None else None
    return Victim(
        token=attempt.token,
        at=attempt.ended_at,
        worker=attempt.worker_id,
        worker_name=worker.name if worker is not None else None,
        host=host,
        kind=autopsy.kind.value if autopsy is not None else None,
        cause=brief_cause(autopsy) if autopsy is not None else attempt.cause or "no cause was written down",
    )
