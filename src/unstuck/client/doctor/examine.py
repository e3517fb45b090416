"""Run the doctor's checks: on a ledger, and on one job."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, assert_never

import msgspec

from unstuck.client.doctor.broker import check_dropped
from unstuck.client.doctor.database import check_blocking, check_housekeeping, check_servers, check_wakeups, check_watch
from unstuck.client.doctor.facts import Facts, LedgerTrouble, Thresholds
from unstuck.client.doctor.failures import check_failing
from unstuck.client.doctor.findings import Finding, capital, in_order, problem
from unstuck.client.doctor.jobs import (
    check_concurrency_keys,
    check_scheduled,
    check_schedules,
    check_waiting,
    check_workflows,
    severity_of,
    workflow_paused,
)
from unstuck.client.doctor.settings import check_clocks, check_timing
from unstuck.client.doctor.workers import check_containment, check_fleet, check_recovery
from unstuck.client.reasons import JobContext, Reason, describe, explain_isolation, find_reason
from unstuck.client.workflows.text import headline, place_of, role, waits_for, why_not_begun
from unstuck.domain.conditions import Code, Severity
from unstuck.domain.states import JobState
from unstuck.domain.workflows import WorkflowState
from unstuck.ledger.contract.diagnosis import Diagnosis
from unstuck.ledger.contract.jobs import JobRecord
from unstuck.ledger.contract.workflows import WorkflowRecord

Check = Callable[[Facts, Diagnosis, Thresholds], Iterator[Finding]]

CHECKS: tuple[Check, ...] = (
    check_waiting,
    check_concurrency_keys,
    check_failing,
    check_scheduled,
    check_workflows,
    check_schedules,
    check_recovery,
    check_fleet,
    check_dropped,
    check_clocks,
    check_watch,
    check_servers,
    check_blocking,
    check_wakeups,
    check_housekeeping,
    check_timing,
    check_containment,
)


def examine(facts: Facts, limits: Thresholds | None = None) -> list[Finding]:
    """Give everything that is worth a word; nothing that is a problem or a warning where all is well."""
    if facts.trouble is not None or facts.diagnosis is None:
        trouble = facts.trouble or LedgerTrouble("unreachable", "The ledger gave no answer.")
        limits = limits or Thresholds()
        blocking = list(check_blocking(facts, None, limits)) if trouble.kind == "busy" else []
        # What is in the way says more than that something is.
        return in_order(blocking or [in_trouble(trouble)])
    diagnosis = facts.diagnosis
    return in_order(finding for check in CHECKS for finding in check(facts, diagnosis, limits or Thresholds()))


def in_trouble(trouble: LedgerTrouble) -> Finding:
    """Say why nothing else can be said."""
    match trouble.kind:
        case "none":
            code, what = Code.NO_LEDGER, "There is no ledger here yet"
            cure = "Run `unstuck migrate`, start a worker or enqueue a job; or name another ledger with --url or --app."
        case "behind":
            code, what = Code.SCHEMA_BEHIND, "The tables or functions are older than this code"
            cure = "Run `unstuck migrate`; workers of the last release keep working meanwhile."
        case "ahead":
            code, what = Code.SCHEMA_AHEAD, "The tables are newer than this code and no longer work with it"
            cure = "Upgrade Unstuck here, or name another ledger with --url or --app."
        case "forked":
            code, what = Code.SCHEMA_FORKED, "The tables were made by a version that was never released"
            cure = "Name another ledger with --url or --app, or drop these tables if nothing in them is needed."
        case "busy":
            code, what = Code.LEDGER_UNREACHABLE, "The ledger did not answer in time"
            cure = "Look for long transactions in the database, and for its load. Then run the doctor again."
        case "standby":
            code, what = Code.STANDBY, "This database server is a standby"
            cure = (
                "Name the primary in the URL, or better all servers: postgresql://USER@HOST1,HOST2/DATABASE"
                "?target_session_attrs=primary. If the primary is lost, promote the standby (`pg_ctl promote`, `select "
                "pg_promote()`). Workers keep trying and go on by themselves."
            )
        case "unreachable":
            code, what = Code.LEDGER_UNREACHABLE, "The ledger cannot be reached"
            cure = (
                "Bring the database back, or mend the address (--url, --app, $UNSTUCK_URL). Workers keep trying "
                "and go on by themselves."
            )
    return problem(code, what, trouble.message, cure)


_ITS_OWN_TIME = frozenset(
    {Code.SCHEDULED, Code.QUEUEING, Code.WAITING, Code.CONCURRENCY_KEY_FULL, Code.QUEUE_AT_LIMIT, Code.RATE_LIMITED}
)
_NOTHING = "Nothing; it goes on by itself."


def examine_job(job: JobRecord, context: JobContext, system: Sequence[Finding] = ()) -> list[Finding]:
    """Give what there is to say of the job first, then what is wrong around it and concerns it."""
    reason = find_reason(job, context)
    if context.own_workflow is not None:
        own = _whole(job, context.own_workflow)
    elif reason is None:
        own = _going(job, context)
    else:
        own = _waiting(job, reason)
    if context.flow is not None and context.place:
        own = _as_node(own, context.flow, context.place)
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
            return "sleeps" if job.awaits_signal is None else f"waits for signal {job.awaits_signal!r}"
        case _:
            return f"{where} and does not run"


def _going(job: JobRecord, context: JobContext) -> Finding:
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
            cure = f"Mend the cause (`unstuck why {job.id}` tells it), then `unstuck retry {job.id}`."
            return _say(Code.QUARANTINED, Severity.WARNING, f"{name} is quarantined", _cause(job), cure, job)
        case JobState.CANCELLED:
            cure = f"Nothing; `unstuck retry {job.id}` runs it after all."
            return _say(Code.CANCELLED, Severity.INFO, f"{name} was cancelled", _cause(job), cure, job)
        case JobState.RUNNING:
            why = _with_alone(describe(job, context), job)
            return _say(Code.RUNNING, Severity.INFO, f"{name} is running", why, _NOTHING, job)
        case JobState.CLAIMED | JobState.PENDING | JobState.WAITING:
            why = _with_alone(describe(job, context), job)
            return _say(Code.STARTING, Severity.INFO, f"{name} is about to start", why, _NOTHING, job)
        case _:
            assert_never(job.state)


def _with_alone(why: str, job: JobRecord) -> str:
    alone = explain_isolation(job)
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
        "alone": job.run_alone,
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
