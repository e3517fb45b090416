"""Say in one sentence why a job is not moving, and what it is doing otherwise."""

from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from unstuck.config import Recovery
from unstuck.domain.durations import brief
from unstuck.domain.policy import decode_policy
from unstuck.domain.states import FINAL, LIVING, JobState, WorkerState
from unstuck.store.records import JobRecord, QueueRecord, WorkerRecord

# Clocks of two machines differ a little: a job due this soon is due.
DUE_SOON_S = 0.5


class Surroundings(msgspec.Struct, frozen=True):
    """What a job's waiting depends on, at one instant."""

    queue: QueueRecord | None
    workers: Sequence[WorkerRecord]
    recovery: Recovery
    now_s: float


def explain_wait(job: JobRecord, around: Surroundings) -> str | None:
    """Give the reason why it does not move; None for a job that is finished or runs as it should."""
    if job.state in FINAL:
        return None
    if job.state is JobState.PENDING:
        return _explain_pending(job, around)
    return _explain_held(job, around)


def describe(job: JobRecord, around: Surroundings) -> str:
    """Say what the job is doing, always."""
    reason = explain_wait(job, around)
    if reason is not None:
        return reason
    if job.state in FINAL:
        return f"It has ended: {job.state}."
    worker = _worker_of(job, around)
    where = f" on worker {worker.name}" if worker else ""
    if job.state is JobState.RUNNING:
        since = f" for {brief(max(0.0, around.now_s - job.started_at))}" if job.started_at is not None else ""
        return f"It has been running{where}{since} (try {job.attempt})."
    return f"It is in the hands of a worker{where} and about to start."


def _explain_pending(job: JobRecord, around: Surroundings) -> str:
    obstacle = _obstacle(job, around)
    wait_s = job.run_at - around.now_s
    if wait_s > DUE_SOON_S:
        why = "It waits out its backoff until" if job.failures or job.crash_count else "It is scheduled for"
        when = datetime.fromtimestamp(job.run_at, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
        tail = f"; besides, {obstacle[0].lower()}{obstacle[1:]}" if obstacle else "."
        return f"{why} {when} (in {brief(wait_s)}){tail}"
    return obstacle or _queueing(job, around)


def _obstacle(job: JobRecord, around: Surroundings) -> str | None:
    if around.queue is not None and around.queue.paused:
        return f"Queue {job.queue!r} is paused; `unstuck resume {job.queue}` lets it go on."
    living = [worker for worker in around.workers if _is_well(worker)]
    serving = [worker for worker in living if job.queue in worker.queues]
    if not serving:
        verb = "serves" if len(living) == 1 else "serve"
        others = f" ({_count(len(living), 'worker')} {verb} other queues)" if living else ""
        return (
            f"No living worker serves queue {job.queue!r}{others}; "
            f"start one with `unstuck worker module:app --queues {job.queue}`."
        )
    knowing = [worker for worker in serving if job.task in worker.tasks]
    if not knowing:
        who = "The worker" if len(serving) == 1 else f"None of the {len(serving)} workers"
        knows = "does not know" if len(serving) == 1 else "knows"
        return f"{who} of queue {job.queue!r} {knows} task {job.task!r}; start one whose app has it."
    staying = [worker for worker in knowing if worker.state is not WorkerState.DRAINING and not worker.request]
    if not staying:
        return f"Every worker that could take it is shutting down; start another for queue {job.queue!r}."
    if all(worker.disabled for worker in staying):
        return _all_disabled(staying)
    return None


def _all_disabled(workers: Sequence[WorkerRecord]) -> str:
    first = workers[0]
    assert first.disabled is not None
    whom = f"--host {first.host}" if first.disabled.of_host else first.name
    who = "The worker" if len(workers) == 1 else f"Each of the {len(workers)} workers"
    why = f"by {first.disabled.by}: {first.disabled.reason}"
    return f"{who} that could take it is disabled ({why}); `unstuck workers enable {whom}` lets it go on."


def _queueing(job: JobRecord, around: Surroundings) -> str:
    able = [
        worker for worker in around.workers if _is_well(worker) and job.queue in worker.queues and not worker.disabled
    ]
    slots = sum(worker.concurrency for worker in able)
    ready = around.queue.pending if around.queue is not None else 0
    waiting = f"; {_count(ready, 'job')} of queue {job.queue!r} wait" if ready > 1 else ""
    return f"It waits for one of {_count(slots, 'slot')} on {_count(len(able), 'worker')}{waiting}."


def _explain_held(job: JobRecord, around: Surroundings) -> str | None:
    worker = _worker_of(job, around)
    if worker is None:
        verb = "--fail" if job.state is JobState.RUNNING else "--requeue"
        return f"Its worker {job.worker_id} is no longer in the ledger; `unstuck stale {verb}` settles the job."
    who = f"Its worker {worker.name} ({worker.id}) on {worker.host}"
    if worker.state not in LIVING:
        return f"{who} is {worker.state}{_who_settles(job, around)}"
    patience_s = _patience_s(job, worker, around.recovery)
    if worker.state is not WorkerState.SUSPECT and worker.silent_s < worker.suspect_after_s:
        return None
    silent = f"{who} has been silent for {brief(worker.silent_s)}"
    if patience_s is None:
        return f"{silent}; its task has no heartbeat, so the job is judged by its deadline alone."
    if worker.silent_s < patience_s:
        return f"{silent} and is given up after {brief(patience_s)}{_who_settles(job, around)}"
    return f"{silent}{_who_settles(job, around)}"


def _who_settles(job: JobRecord, around: Surroundings) -> str:
    recovery = around.recovery
    running = job.state is JobState.RUNNING
    if not (recovery.auto_fail_stale_running if running else recovery.auto_requeue_stale_claimed):
        verb = "--fail" if running else "--requeue"
        return f", and automatic recovery is switched off: `unstuck stale {verb}` settles it by hand."
    if not any(_is_well(worker) for worker in around.workers):
        return ", and no living worker is there to settle it: start one, or `unstuck reaper`."
    return "; the reaper settles it in its next rounds."


def _patience_s(job: JobRecord, worker: WorkerRecord, recovery: Recovery) -> float | None:
    if job.state is not JobState.RUNNING:
        return worker.suspect_after_s
    policy = decode_policy(job.policy)
    if not policy.heartbeat:
        return None
    return recovery.running_stale_after_s if policy.heartbeat_timeout_s is None else policy.heartbeat_timeout_s


def _worker_of(job: JobRecord, around: Surroundings) -> WorkerRecord | None:
    return next((worker for worker in around.workers if worker.id == job.worker_id), None)


def _is_well(worker: WorkerRecord) -> bool:
    return worker.state in (WorkerState.ACTIVE, WorkerState.DRAINING) and worker.silent_s < worker.suspect_after_s


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
