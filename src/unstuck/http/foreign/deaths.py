"""Say in facts what became of a worker, and of an attempt that is no longer its own."""

from typing import Any

from unstuck.client.views import instant
from unstuck.domain.states import HELD, LIVING, WorkerState
from unstuck.http.problems import Problem
from unstuck.store.contract import Ledger
from unstuck.store.records import AttemptRecord, JobRecord, WorkerRecord

Facts = dict[str, Any]


def death_of(worker: WorkerRecord) -> Facts:
    """Tell of a worker that is dead or stopped."""
    verdict = worker.verdict if worker.state is WorkerState.DEAD else None
    return {
        "id": worker.id,
        "state": worker.state.value,
        "at": instant(worker.stopped_at),
        "detector": verdict.detector.value if verdict else None,
        "evidence": verdict.evidence if verdict else None,
        "detail": sentence(worker),
    }


def sentence(worker: WorkerRecord) -> str:
    who, at = f"worker {worker.name} ({worker.id})", instant(worker.stopped_at)
    match worker.state:
        case WorkerState.DEAD if worker.verdict is not None:
            return f"{who} was declared dead at {at} ({worker.verdict.evidence}; {worker.verdict.detector})"
        case WorkerState.DEAD:
            return f"{who} was declared dead at {at}"
        case WorkerState.STOPPED:
            return f"{who} was shut down at {at}"
        case _:
            return f"{who} is {worker.state}"


def gone_problem(worker: WorkerRecord, cure: str = "", **facts: Any) -> Problem:
    return Problem(
        409,
        "worker_gone",
        f"{_begin(sentence(worker))}. It holds nothing any more.",
        cure=cure or "Stop what it ran, and register anew: POST /api/v1/workers.",
        worker=death_of(worker),
        **facts,
    )


def ended_as(ledger: Ledger, worker_id: str, job_id: int, token: int) -> AttemptRecord | None:
    """Give this very attempt of this worker, if it is over."""
    for attempt in ledger.attempts(job_id):
        if attempt.token == token and attempt.worker_id == worker_id and attempt.ended_at is not None:
            return attempt
    return None


def superseded(ledger: Ledger, worker: WorkerRecord | None, job_id: int, token: int) -> Facts:
    """Tell what happened to an attempt that a worker took for its own."""
    job = ledger.job(job_id)
    parts = []
    if worker is not None and worker.state not in LIVING:
        parts.append(sentence(worker))
    parts.append(_of_job(ledger, job, job_id, token))
    return {
        "job_id": job_id,
        "token": token,
        "detail": _begin("; ".join(parts)) + ".",
        "job": None if job is None else _job_facts(job),
        "worker": None if worker is None or worker.state in LIVING else death_of(worker),
    }


def _of_job(ledger: Ledger, job: JobRecord | None, job_id: int, token: int) -> str:
    if job is None:
        return f"job {job_id} does not exist (it was pruned, or never stored)"
    if job.state in HELD:
        if job.token == token:
            return f"job {job_id} is {job.state} as token {token}, at worker {job.worker_id}"
        other = ledger.foreign_worker(job.worker_id or "")
        who = f"{other.name} ({other.id})" if other is not None else str(job.worker_id)
        doing = "runs" if job.started_at is not None else "is claimed"
        return f"job {job_id} was requeued and {doing} at worker {who} as token {job.token}"
    if job.finished_at is not None:
        why = f" ({job.error.code})" if job.error is not None else ""
        whose = "this very token" if job.token == token else "another token"
        return f"job {job_id} {job.state} at {instant(job.finished_at)}{why}, by {whose}"
    return f"job {job_id} was requeued and waits to be taken"


def _job_facts(job: JobRecord) -> Facts:
    return {
        "state": job.state.value,
        "token": job.token if job.state in HELD else None,
        "worker": job.worker_id if job.state in HELD else None,
        "attempt": job.attempt,
        "error": None if job.error is None else job.error.code,
        "finished_at": instant(job.finished_at),
    }


def _begin(text: str) -> str:
    return text[:1].upper() + text[1:]
