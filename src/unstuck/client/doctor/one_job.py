"""Say of one job why it is not running, or how it runs or ended, and what can be done."""

from collections.abc import Sequence
from typing import Any, assert_never

import msgspec

from unstuck.client.doctor.codes import Code, Severity
from unstuck.client.doctor.finding import Finding, capital
from unstuck.client.doctor.flows import workflow_paused
from unstuck.client.doctor.waiting import severity_of
from unstuck.client.explaining import Reason, Surroundings, describe, explain_alone, find_reason
from unstuck.client.flow.words import headline, place_of, role, waits_for, why_not_begun
from unstuck.domain.states import JobState
from unstuck.domain.workflow import WorkflowState
from unstuck.store.records import JobRecord, WorkflowRecord

_ITS_OWN_TIME = frozenset(
    {Code.SCHEDULED, Code.QUEUEING, Code.WAITING, Code.LINE_FULL, Code.QUEUE_AT_LIMIT, Code.RATE_LIMITED}
)
_NOTHING = "Nothing; it goes on by itself."


def examine_job(job: JobRecord, around: Surroundings, system: Sequence[Finding] = ()) -> list[Finding]:
    """Give what there is to say of the job first, then what is wrong around it and concerns it."""
    reason = find_reason(job, around)
    if around.whole_flow is not None:
        own = _whole(job, around.whole_flow)
    elif reason is None:
        own = _going(job, around)
    else:
        own = _waiting(job, reason)
    if around.flow is not None and around.place:
        own = _as_node(own, around.flow, around.place)
    return [own, *(finding for finding in system if _concerns(finding, job, own))]


def _whole(job: JobRecord, flow: WorkflowRecord) -> Finding:
    """Say how a workflow stands, of the job that stands for it."""
    name = f"Workflow {flow.id} ({flow.name})"
    retry = f"`unstuck workflow {flow.id}` draws it; `unstuck workflows retry {flow.id}` takes it up again."
    match flow.state:
        case WorkflowState.PAUSED:
            return workflow_paused(flow)
        case WorkflowState.RUNNING:
            return _say(Code.WAITING, Severity.INFO, f"{name} goes on", waits_for(flow), _NOTHING, job)
        case WorkflowState.SUCCEEDED:
            return _say(Code.SUCCEEDED, Severity.INFO, f"{name} has succeeded", headline(flow), "Nothing.", job)
        case WorkflowState.FAILED:
            return _say(Code.FAILED, Severity.WARNING, f"{name} has failed", headline(flow), retry, job)
        case WorkflowState.CANCELLED:
            return _say(Code.CANCELLED, Severity.INFO, f"{name} was cancelled", headline(flow), retry, job)
        case _:
            assert_never(flow.state)


def _as_node(own: Finding, flow: WorkflowRecord, place: int) -> Finding:
    """Add where in its workflow the job stands."""
    said = [f"{own.why.rstrip('.')}.", f"It is {place_of(flow, place)}.", why_not_begun(flow, place), role(flow, place)]
    facts = {**own.facts, "workflow": flow.id, "place": place}
    return msgspec.structs.replace(own, why=" ".join(part for part in said if part), facts=facts)


def _waiting(job: JobRecord, reason: Reason) -> Finding:
    own_time = reason.code in _ITS_OWN_TIME
    # A scheduled job with an obstacle before it will be late: better said now.
    blocked = reason.code is Code.SCHEDULED and reason.cure
    severity = (Severity.WARNING if blocked else Severity.INFO) if own_time else severity_of(reason.code)
    verb = "is held by" if job.worker_id else "waits in"
    where = f"worker {job.worker_id}" if job.worker_id else f"queue {job.queue!r}"
    return Finding(
        reason.code,
        severity,
        f"Job {job.id} ({job.task}) {_standing(job, reason, f'{verb} {where}')}",
        _with_alone(f"{reason.why}.", job),
        f"{capital(reason.cure)}." if reason.cure else _NOTHING,
        _facts(job),
    )


def _standing(job: JobRecord, reason: Reason, where: str) -> str:
    match job.state:
        case JobState.RUNNING | JobState.CLAIMED if reason.code is Code.BLOCKING_TRANSACTION:
            return "is over, and a lock keeps that from the ledger"
        case JobState.RUNNING:
            return f"{where}, which gives no sign of life"
        case JobState.WAITING:
            return "sleeps" if job.awaits is None else f"waits for signal {job.awaits!r}"
        case _:
            return f"{where} and does not run"


def _going(job: JobRecord, around: Surroundings) -> Finding:
    name = f"Job {job.id} ({job.task})"
    match job.state:
        case JobState.SUCCEEDED:
            return _say(
                Code.SUCCEEDED, Severity.INFO, f"{name} has succeeded", "It ended as it should.", "Nothing.", job
            )
        case JobState.FAILED:
            cure = f"`unstuck why {job.id}` tells the story; `unstuck retry {job.id}` runs it again."
            return _say(Code.FAILED, Severity.WARNING, f"{name} has failed", _cause(job), cure, job)
        case JobState.QUARANTINED:
            cure = f"Mend the cause (`unstuck why {job.id}` tells it), then `unstuck quarantine release {job.id}`."
            return _say(Code.QUARANTINED, Severity.WARNING, f"{name} is quarantined", _cause(job), cure, job)
        case JobState.CANCELLED:
            cure = f"Nothing; `unstuck retry {job.id}` runs it after all."
            return _say(Code.CANCELLED, Severity.INFO, f"{name} was cancelled", _cause(job), cure, job)
        case JobState.RUNNING:
            why = _with_alone(describe(job, around), job)
            return _say(Code.RUNNING, Severity.INFO, f"{name} is running", why, _NOTHING, job)
        case JobState.CLAIMED | JobState.PENDING | JobState.WAITING:
            why = _with_alone(describe(job, around), job)
            return _say(Code.STARTING, Severity.INFO, f"{name} is about to start", why, _NOTHING, job)
        case _:
            assert_never(job.state)


def _with_alone(why: str, job: JobRecord) -> str:
    alone = explain_alone(job)
    return f"{why} {alone}" if alone else why


def _cause(job: JobRecord) -> str:
    if job.error is None:
        return "No cause was written down."
    cause = f" ({job.error.cause})" if job.error.cause and job.error.cause != job.error.shown else ""
    return f"{job.error}{cause}"


def _say(code: Code, severity: Severity, what: str, why: str, cure: str, job: JobRecord) -> Finding:
    return Finding(code, severity, what, why, cure, _facts(job))


def _facts(job: JobRecord) -> dict[str, Any]:
    return {
        "job": job.id,
        "task": job.task,
        "queue": job.queue,
        "state": job.state.value,
        "worker": job.worker_id,
        "attempt": job.attempt,
        "alone": job.alone,
        "error": job.error.code if job.error is not None else None,
    }


def _concerns(finding: Finding, job: JobRecord, own: Finding) -> bool:
    if finding.code is own.code:
        return False
    match finding.code:
        case Code.WORKFLOW_PAUSED:
            return own.facts.get("workflow") == finding.facts.get("workflow")
        case Code.NO_REAPER:
            return True
        case Code.IDLE_WORKER:
            waits = job.state is JobState.PENDING and job.queue in finding.facts.get("queues", ())
            return waits or (job.worker_id is not None and finding.facts.get("worker") == job.worker_id)
        case Code.LATE_BEATS | Code.SILENT_WORKER | Code.DEAD_WORKER_HOLDS_JOBS:
            return job.worker_id is not None and finding.facts.get("worker") == job.worker_id
        case Code.DUE_BUT_WAITING:
            mine = (finding.facts.get("queue"), finding.facts.get("task")) == (job.queue, job.task)
            return job.state is JobState.PENDING and mine
        case _:
            return False
