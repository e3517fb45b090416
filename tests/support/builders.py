"""Build records with plain values; enqueue, claim and end jobs without a worker process.

    ledger.workers.register(birth("w1", queues=("mail",)))
    job = running(ledger, "w1")
    turn(ledger, "w1", done=[done(job)])

A test names only the values that matter to it.
"""

import os
from collections.abc import Sequence
from typing import Any

from unstuck import host
from unstuck.domain.endings import Ending, JobError, Release
from unstuck.domain.liveness import Detector
from unstuck.domain.states import AttemptState, JobState, WorkerState
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.jobs import NewJob, TaskRecord
from unstuck.ledger.contract.workers import (
    AttemptRef,
    Claimed,
    ClaimRequest,
    NewWorker,
    Success,
    Turn,
    TurnAnswer,
    WorkerRecord,
    WorkerVerdict,
)

QUEUE = "default"
TASK = "add"


def birth(worker_id: str = "w1", **changes: Any) -> NewWorker:
    """Return a worker to register: this process, unless told otherwise, with a lease of a fifth of a second."""
    facts: dict[str, Any] = {
        "id": worker_id,
        "name": f"name-of-{worker_id}",
        "host": host.hostname(),
        "pid": os.getpid(),
        "boot_id": host.boot_id(),
        "pid_namespace": host.pid_namespace(),
        "process_started": host.process_started(os.getpid()),
        "queues": (QUEUE,),
        "tasks": (TaskRecord(TASK, QUEUE),),
        "concurrency": 4,
        "version": "1.0",
        "heartbeat_interval_s": 0.05,
        "suspect_after_s": 0.2,
        "running_stale_after_s": 0.2,
    }
    return NewWorker(**{**facts, **changes})


def worker_record(name: str = "ada", **changes: Any) -> WorkerRecord:
    """Return an active worker as the ledger shows it."""
    facts: dict[str, Any] = {
        "id": f"id-of-{name}",
        "name": name,
        "host": "here",
        "pid": 4711,
        "state": WorkerState.ACTIVE,
        "queues": (QUEUE,),
        "tasks": (TASK,),
        "concurrency": 4,
        "created_at": 0.0,
        "last_seen_at": 0.0,
        "silent_s": 0.0,
        "stopped_at": None,
        "running": 0,
        "processed": 0,
        "held": 0,
        "version": "1.0",
        "metadata": {},
        "verdict": None,
        "request": None,
        "heartbeat_interval_s": 5.0,
        "suspect_after_s": 30.0,
    }
    return WorkerRecord(**{**facts, **changes})


def new_job(**changes: Any) -> NewJob:
    facts: dict[str, Any] = {"task": TASK, "queue": QUEUE, "payload": b'{"args":[1,2]}'}
    return NewJob(**{**facts, **changes})


def put(ledger: Ledger, **changes: Any) -> int:
    """Enqueue one job and give its id."""
    return ledger.jobs.enqueue([new_job(**changes)])[0].job_id


def turn(ledger: Ledger, worker_id: str = "w1", **parts: Any) -> TurnAnswer:
    return ledger.workers.turn(Turn(worker_id, **{name: tuple(value) for name, value in parts.items()}))


def wish(
    ledger: Ledger,
    worker_id: str = "w1",
    limit: int = 100,
    *,
    queues: Sequence[str] = (QUEUE,),
    tasks: Sequence[str] = (TASK,),
    run_ahead: bool = False,
    start: int = 0,
) -> TurnAnswer:
    return ledger.workers.turn(
        Turn(worker_id, claim_request=ClaimRequest(tuple(queues), tuple(tasks), limit, run_ahead, start))
    )


def claim_jobs(ledger: Ledger, worker_id: str = "w1", limit: int = 100, **more: Any) -> list[Claimed]:
    answer = wish(ledger, worker_id, limit, **more)
    assert answer.alive
    return list(answer.claimed)


def start(ledger: Ledger, jobs: Sequence[Claimed], worker_id: str = "w1") -> None:
    answer = turn(ledger, worker_id, start=[AttemptRef(job.job_id, job.token) for job in jobs])
    assert answer.alive
    assert answer.superseded == frozenset()


def run(ledger: Ledger, worker_id: str = "w1", limit: int = 100, **more: Any) -> list[Claimed]:
    """Claim and start."""
    jobs = claim_jobs(ledger, worker_id, limit, **more)
    start(ledger, jobs, worker_id)
    return jobs


def running(ledger: Ledger, worker_id: str = "w1", **changes: Any) -> Claimed:
    """Enqueue one job and have it run by this worker."""
    job_id = put(ledger, **changes)
    [job] = run(ledger, worker_id)
    assert job.job_id == job_id
    return job


def done(job: Claimed, result: bytes = b"3") -> Success:
    return Success(job.job_id, job.token, result)


def release(job: Claimed, **more: Any) -> Release:
    return Release(job.job_id, job.token, **more)


def crash(job: Claimed, **changes: Any) -> Ending:
    """The end of a job whose process died and which is not tried again."""
    return _ending(job, JobState.FAILED, AttemptState.CRASHED, "WORKER_CRASHED", counter="crash", **changes)


def crash_retry(job: Claimed, delay_s: float = 0.0, **changes: Any) -> Ending:
    facts = {"counter": "crash", "delay_s": delay_s, "event": "requeued", "message": "Task re-queued", **changes}
    return _ending(job, JobState.PENDING, AttemptState.CRASHED, "WORKER_CRASHED", **facts)


def failure(job: Claimed, **changes: Any) -> Ending:
    facts = {"counter": "failure", "event": "failed", "message": "TASK_FAILED: boom", **changes}
    return _ending(job, JobState.FAILED, AttemptState.FAILED, "TASK_FAILED", **facts)


def failure_retry(job: Claimed, delay_s: float = 0.0, **changes: Any) -> Ending:
    facts = {"counter": "failure", "delay_s": delay_s, "event": "retrying", "message": "boom", **changes}
    return _ending(job, JobState.PENDING, AttemptState.FAILED, "TASK_FAILED", **facts)


def _ending(job: Claimed, state: JobState, attempt: AttemptState, code: str, **changes: Any) -> Ending:
    error = changes.pop("error", JobError(code, "boom", "because", {"type": "ValueError"}))
    return Ending(job.job_id, job.token, state, attempt, error=error, **changes)


def verdict(state: WorkerState = WorkerState.DEAD, **changes: Any) -> WorkerVerdict:
    facts: dict[str, Any] = {
        "state": state,
        "detector": Detector.LEASE,
        "evidence": "no heartbeat",
        "silent_s": 1.0,
        "by": "reaper",
    }
    return WorkerVerdict(**{**facts, **changes})


def state_of(ledger: Ledger, job_id: int) -> JobState:
    record = ledger.jobs.get(job_id)
    assert record is not None
    return record.state
