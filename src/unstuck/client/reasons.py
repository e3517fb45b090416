"""Say in one sentence why a job is not moving, and what it is doing otherwise."""

import shlex
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime

import msgspec

from unstuck.client.blockers import blocker_of, end_blocker, tell_blocker
from unstuck.client.workflows.text import waits_for
from unstuck.domain.conditions import Code, cure_unserved, reaper_is_missing, why_unserved
from unstuck.domain.limits import write_rate
from unstuck.domain.liveness import BY_SILENCE
from unstuck.domain.policy import decode_policy
from unstuck.domain.recovery_rules import RecoveryRules, is_recovered, rules_of_ledger
from unstuck.domain.states import FINAL_STATES, HELD_STATES, LIVE_STATES, JobState, WorkerState
from unstuck.domain.units import brief
from unstuck.domain.workflows import WorkflowState
from unstuck.errors import LedgerError
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.diagnosis import Blocker
from unstuck.ledger.contract.jobs import DeferredRecord, JobLinks, JobRecord
from unstuck.ledger.contract.queues import KeyRecord, QueueLimitRecord, QueueRecord
from unstuck.ledger.contract.workers import WorkerRecord
from unstuck.ledger.contract.workflows import WorkflowRecord

# Clocks of two machines differ a little: a job due this soon is due.
DUE_SOON_S = 0.5
HOLDERS_NAMED = 3
BLOCKING_S = 0.5
"""Minimum age of a transaction that is said to keep an outcome from the ledger."""


class JobContext(msgspec.Struct, frozen=True):
    """What a job's waiting depends on, at one instant."""

    queue: QueueRecord | None
    workers: Sequence[WorkerRecord]
    rules: RecoveryRules
    """The recovery settings here: for workers that stored none."""
    now_s: float
    flow: WorkflowRecord | None = None
    """The workflow that the job belongs to."""
    place: int | None = None
    """Its place there; 0: it stands for the workflow."""
    waiting_since: float | None = None
    """When it gave its slot back, where it did."""
    links: JobLinks | None = None
    """What it has beside its work; None for a job that ended."""
    concurrency_key: KeyRecord | None = None
    """The line that it stands in, where there is one."""
    limit: QueueLimitRecord | None = None
    """The limit of its queue, where it has one."""
    deferred: DeferredRecord | None = None
    """Since when its outcome waits for a lock, if it does."""
    blockers: Sequence[Blocker] = ()
    """Transactions that hold locks of the ledger; looked for only if the outcome waits for one."""
    swept: bool = False
    """A reaper did a round lately. It may run outside of any worker."""

    @property
    def own_workflow(self) -> WorkflowRecord | None:
        """The workflow that the job stands for."""
        return self.flow if self.place == 0 else None


def gather_context(
    ledger: Ledger,
    rules: RecoveryRules,
    job: JobRecord,
    *,
    workers: Sequence[WorkerRecord] | None = None,
    queues: Sequence[QueueRecord] | None = None,
) -> JobContext:
    """Read what a job's waiting depends on. Workers and queues are read unless they are given."""
    queue = None
    if job.state not in FINAL_STATES:
        queues = ledger.queues.list() if queues is None else queues
        queue = next((queue for queue in queues if queue.name == job.queue), None)
    workers = ledger.workers.list() if workers is None else list(workers)
    links, key, limit = None, None, None
    if job.state is JobState.PENDING:
        links = ledger.jobs.links(job.id)
        if links is not None and links.concurrency_key is not None:
            key = next(iter(ledger.queues.concurrency_keys(links.concurrency_key)), None)
        limit = next((one for one in ledger.queues.limits() if one.name == job.queue), None)
    placed = ledger.workflows.place_of(job.id)
    workflow = None if placed is None else ledger.workflows.get(placed[0])
    waiting_since = None
    if job.state is JobState.WAITING and (attempts := ledger.jobs.attempts(job.id)):
        waiting_since = attempts[-1].ended_at
    deferred = ledger.jobs.deferred_outcome(job.id) if job.state in HELD_STATES else None
    blockers: Sequence[Blocker] = ()
    if deferred is not None:
        # Who blocks it is good to know, but not needed.
        with suppress(LedgerError):
            blockers = ledger.blockers(open_s=BLOCKING_S)
    return JobContext(
        queue=queue,
        workers=workers,
        rules=rules,
        now_s=time.time(),
        flow=workflow,
        place=None if placed is None or workflow is None else placed[1],
        waiting_since=waiting_since,
        links=links,
        concurrency_key=key,
        limit=limit,
        deferred=deferred,
        blockers=blockers,
        swept=job.state in HELD_STATES and _is_swept(ledger, rules),
    )


def _is_swept(ledger: Ledger, rules: RecoveryRules) -> bool:
    """Return whether a reaper did a round lately, in a worker or elsewhere."""
    interval_s = rules_of_ledger(ledger.recovery.rules(), rules).check_interval_s
    return not reaper_is_missing(ledger.workers.fleet().unswept_s, interval_s, ())


class Reason(msgspec.Struct, frozen=True):
    """Why a job does not move, and what can be done about it."""

    code: Code
    why: str
    cure: str = ""
    joint: str = "; "
    command: str = ""
    """The cure as a command to paste, where it is one."""

    @property
    def sentence(self) -> str:
        return f"{self.why}{self.joint}{self.cure}." if self.cure else f"{self.why}."


def explain_wait(job: JobRecord, context: JobContext) -> str | None:
    """Give the reason why it does not move; None for a job that is finished or runs as it should."""
    reason = find_reason(job, context)
    return None if reason is None else reason.sentence


def find_reason(job: JobRecord, context: JobContext) -> Reason | None:
    """Give the same with its parts."""
    if job.state in FINAL_STATES:
        return None
    if context.own_workflow is not None:
        return _explain_workflow(context.own_workflow)
    if job.state is JobState.PENDING:
        return _explain_pending(job, context)
    if job.state is JobState.WAITING:
        return _explain_suspended(job, context)
    return _explain_held(job, context)


def describe(job: JobRecord, context: JobContext) -> str:
    """Say what the job is doing, always."""
    reason = explain_wait(job, context)
    if reason is not None:
        return reason
    if job.state in FINAL_STATES:
        return f"It has ended: {job.state}."
    if context.own_workflow is not None:
        return waits_for(context.own_workflow)
    worker = _worker_of(job, context)
    where = f" on worker {worker.name}" if worker else ""
    if job.state is JobState.RUNNING:
        since = f" for {brief(max(0.0, context.now_s - job.started_at))}" if job.started_at is not None else ""
        return f"It has been running{where}{since} (try {job.attempt})."
    return f"It is in the hands of a worker{where} and about to start."


def explain_isolation(job: JobRecord) -> str:
    """Say that a job runs alone, where it does; empty for all others."""
    if not job.run_alone or job.state in FINAL_STATES:
        return ""
    verb = "runs" if job.state is JobState.RUNNING else "will run"
    return f"It {verb} alone in its process: it is suspected of having killed one."


def find_obstacle(queue: str, task: str, paused: bool, workers: Sequence[WorkerRecord]) -> Reason | None:
    """Say what keeps every ready job of this queue and task from being taken; None where only a slot is missing."""
    if paused:
        return Reason(Code.QUEUE_PAUSED, f"Queue {queue!r} is paused", f"`unstuck resume {queue}` lets it go on")
    living = [worker for worker in workers if is_healthy(worker)]
    serving = [worker for worker in living if queue in worker.queues]
    if not serving:
        return Reason(Code.NO_WORKER_FOR_QUEUE, why_unserved(queue, len(living)), cure_unserved(queue))
    knowing = [worker for worker in serving if task in worker.tasks]
    if not knowing:
        who = "The worker" if len(serving) == 1 else f"None of the {len(serving)} workers"
        knows = "does not know" if len(serving) == 1 else "knows"
        why = f"{who} of queue {queue!r} {knows} task {task!r}"
        return Reason(Code.TASK_UNKNOWN, why, "start one whose app has it")
    staying = [worker for worker in knowing if worker.state is not WorkerState.DRAINING and not worker.request]
    if not staying:
        why = "Every worker that could take it is shutting down"
        return Reason(Code.WORKERS_LEAVING, why, f"start another for queue {queue!r}")
    return _all_disabled(staying) if all(worker.disabled for worker in staying) else None


def _all_disabled(workers: Sequence[WorkerRecord]) -> Reason:
    first = workers[0]
    assert first.disabled is not None
    whom = f"--host {first.host}" if first.disabled.of_host else first.name
    who = "The worker" if len(workers) == 1 else f"Each of the {len(workers)} workers"
    why = f"{who} that could take it is disabled (by {first.disabled.by}: {first.disabled.reason})"
    command = f"unstuck workers enable {whom}"
    return Reason(Code.WORKERS_DISABLED, why, f"`{command}` lets it go on", command=command)


def is_healthy(worker: WorkerRecord) -> bool:
    """Say whether a worker beats as it should."""
    return worker.state in (WorkerState.ACTIVE, WorkerState.DRAINING) and worker.silent_s < worker.suspect_after_s


def _explain_pending(job: JobRecord, context: JobContext) -> Reason:
    paused = context.queue is not None and context.queue.paused
    obstacle = find_obstacle(job.queue, job.task, paused, context.workers)
    wait_s = job.run_at - context.now_s
    if wait_s > DUE_SOON_S:
        why = "It waits out its backoff until" if job.failures or job.crash_count else "It is scheduled for"
        when = datetime.fromtimestamp(job.run_at, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
        why = f"{why} {when} (in {brief(wait_s)})"
        if obstacle is None:
            return Reason(Code.SCHEDULED, why)
        return Reason(Code.SCHEDULED, f"{why}; besides, {obstacle.why[0].lower()}{obstacle.why[1:]}", obstacle.cure)
    return _in_line(context) or obstacle or _at_limit(job, context) or _queueing(job, context)


def _in_line(context: JobContext) -> Reason | None:
    """Return which jobs hold its concurrency key, if it was not admitted yet."""
    links, line = context.links, context.concurrency_key
    if links is None or not links.blocked or links.concurrency_key is None:
        return None
    if line is None or not line.holders:
        why = f"It waits for concurrency key {links.concurrency_key!r}, which no job holds"
        return Reason(Code.CONCURRENCY_KEY_FULL, why, "the next sweep of a reaper admits it")
    named = ", ".join(str(one.job_id) for one in line.holders[:HOLDERS_NAMED])
    more = f" and {len(line.holders) - HOLDERS_NAMED} more" if len(line.holders) > HOLDERS_NAMED else ""
    noun = "job" if len(line.holders) == 1 else "jobs"
    why = f"The limit of {line.places} for key {line.key!r} is held by {noun} {named}{more}"
    waiting = [one for one in line.holders if one.state == JobState.PENDING]
    if len(waiting) == len(line.holders):
        first = waiting[0]
        return Reason(
            Code.CONCURRENCY_KEY_FULL, f"{why}, not begun yet", f"`unstuck why {first.job_id}` says what that waits for"
        )
    behind = f"; {_count(line.blocked, 'job')} wait for a place" if line.blocked > 1 else ""
    return Reason(Code.CONCURRENCY_KEY_FULL, f"{why}{behind}")


def _at_limit(job: JobRecord, context: JobContext) -> Reason | None:
    limit = context.limit
    if limit is None or limit.room > 0 or not limit.limit:
        return None
    cure = f"`unstuck queues limit {job.queue} …` changes it"
    if limit.in_s is not None and limit.limit.rate is not None and limit.limit.window_s is not None:
        rate = write_rate(limit.limit.rate, limit.limit.window_s)
        why = f"The rate limit of queue {job.queue!r} ({rate}) lets the next one go in {brief(limit.in_s)}"
        return Reason(Code.RATE_LIMITED, why, cure)
    why = f"Queue {job.queue!r} is at its limit of {limit.limit.concurrency}: {_count(limit.held, 'job')} in hand"
    return Reason(Code.QUEUE_AT_LIMIT, why, cure)


def _explain_suspended(job: JobRecord, context: JobContext) -> Reason:
    left_s = max(0.0, job.run_at - context.now_s)
    when = datetime.fromtimestamp(job.run_at, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
    if job.awaits_signal is None:
        return Reason(Code.WAITING, f"It sleeps until {when} (in {brief(left_s)}), and holds no slot meanwhile")
    since = context.waiting_since
    why = f"It waits for signal {job.awaits_signal!r}"
    if since is not None:
        why += f" since {datetime.fromtimestamp(since, UTC).astimezone().strftime('%Y-%m-%d %H:%M:%S %Z')}"
    if job.wakes:
        why += f", until {when} at the latest"
    command = f"unstuck signal {job.id} {shlex.quote(job.awaits_signal)}"
    return Reason(Code.WAITING, why, f"`{command}` sends it", command=command)


def _queueing(job: JobRecord, context: JobContext) -> Reason:
    able = [
        worker
        for worker in context.workers
        if is_healthy(worker) and job.queue in worker.queues and not worker.disabled
    ]
    slots = sum(worker.concurrency for worker in able)
    ready = context.queue.pending if context.queue is not None else 0
    waiting = f"; {_count(ready, 'job')} of queue {job.queue!r} wait" if ready > 1 else ""
    why = f"It waits for one of {_count(slots, 'slot')} on {_count(len(able), 'worker')}{waiting}"
    return Reason(Code.QUEUEING, why)


def _explain_workflow(flow: WorkflowRecord) -> Reason | None:
    """A workflow does not move where an operator must decide; else its nodes do, and tell their own reasons."""
    if flow.state is not WorkflowState.PAUSED:
        return None
    cure = f"`unstuck workflows retry {flow.id}` tries it again, `unstuck workflows resume {flow.id}` goes on past it"
    return Reason(Code.WORKFLOW_PAUSED, waits_for(flow).rstrip("."), cure)


def _explain_held(job: JobRecord, context: JobContext) -> Reason | None:
    worker = _worker_of(job, context)
    if worker is None:
        verb = "--fail" if job.state is JobState.RUNNING else "--requeue"
        why = f"Its worker {job.worker_id} is no longer in the ledger"
        return Reason(Code.WORKER_GONE, why, f"`unstuck stale {verb}` settles the job")
    who = f"Its worker {worker.name} ({worker.id}) on {worker.host}"
    if worker.state not in LIVE_STATES:
        return _who_settles(job, worker, context, Code.DEAD_WORKER_HOLDS_JOBS, f"{who} is {worker.state}")
    patience_s = _patience_s(job, worker)
    if worker.state is not WorkerState.SUSPECT and worker.silent_s < worker.suspect_after_s:
        return None if context.deferred is None else _outcome_waits(job, context.deferred, context)
    silent = f"{who} has been silent for {brief(worker.silent_s)}"
    if patience_s is None:
        cure = "its task has no heartbeat, so the job is judged by its deadline alone"
        return Reason(Code.SILENT_WORKER, silent, cure)
    if worker.silent_s < patience_s:
        silent = f"{silent} and is given up after {brief(patience_s)}"
    return _who_settles(job, worker, context, Code.SILENT_WORKER, silent)


def _outcome_waits(job: JobRecord, deferred: DeferredRecord, context: JobContext) -> Reason:
    """Say that nothing of the job is left to do but to write how it ended, and who keeps that from the ledger."""
    over = "Its code never began and it goes back to its queue" if deferred.is_return else "Its code has ended"
    since = brief(max(0.0, context.now_s - deferred.since))
    why = f"{over}, but this cannot be written since {since}: another session holds a lock that it needs"
    blocker = blocker_of(job.id, context.blockers)
    if blocker is None:
        told = f" ({deferred.reason.rstrip('.')})" if deferred.reason else ""
        return Reason(
            Code.BLOCKING_TRANSACTION, f"{why}{told}", "end that transaction, and it is written within a second"
        )
    likely = "it is" if job.id in blocker.jobs else "most likely"
    force = f" If no one can, `{command}`" if (command := end_blocker(blocker)) else ""
    why = f"{why}; {likely} {tell_blocker(blocker).rstrip('.')}"
    return Reason(
        Code.BLOCKING_TRANSACTION, why, f"End that transaction, and it is written within a second.{force}", ". "
    )


def _who_settles(job: JobRecord, worker: WorkerRecord, context: JobContext, code: Code, why: str) -> Reason:
    rules = context.rules if worker.rules is None else worker.rules
    # What the kernel saw, or an operator said, is settled whatever the switches say.
    by_silence = worker.state in LIVE_STATES or worker.verdict is None or worker.verdict.detector in BY_SILENCE
    if by_silence and not is_recovered(job.state, decode_policy(job.policy), rules):
        verb = "--fail" if job.state is JobState.RUNNING else "--requeue"
        why = f"{why}, and automatic recovery is switched off"
        return Reason(code, why, f"`unstuck stale {verb}` settles it by hand", ": ")
    if not context.swept and not any(is_healthy(one) for one in context.workers):
        return Reason(
            code, f"{why}, and no living worker is there to settle it", "start one, or `unstuck reaper`", ": "
        )
    return Reason(code, why, "the reaper settles it in its next rounds")


def _patience_s(job: JobRecord, worker: WorkerRecord) -> float | None:
    if job.state is not JobState.RUNNING:
        return worker.suspect_after_s
    policy = decode_policy(job.policy)
    if not policy.heartbeat:
        return None
    usual_s = worker.suspect_after_s if worker.running_stale_after_s is None else worker.running_stale_after_s
    return usual_s if policy.heartbeat_timeout_s is None else policy.heartbeat_timeout_s


def _worker_of(job: JobRecord, context: JobContext) -> WorkerRecord | None:
    return next((worker for worker in context.workers if worker.id == job.worker_id), None)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
