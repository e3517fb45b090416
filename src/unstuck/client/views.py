"""The public shapes of jobs, attempts, workers and queues, the same in the CLI, over HTTP and on the dashboard.

Times are ISO 8601 in UTC, durations are seconds, states are lower case, results are decoded.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import msgspec

from unstuck.client.workflows.outline import Item, outline, root_failures
from unstuck.client.workflows.text import headline, hints
from unstuck.domain import bounds, frames
from unstuck.domain.autopsy import Autopsy
from unstuck.domain.bounded_json import count_json, decode_json
from unstuck.domain.bounds import TOO_MUCH, BoundExceeded, NotDecodable
from unstuck.domain.endings import JobError
from unstuck.domain.frames import FRAMES, begins_as_json
from unstuck.domain.limits import write_rate
from unstuck.domain.node_inputs import ITEM
from unstuck.domain.payload import JSON, decode_call, put_results
from unstuck.domain.policy import Policy, decode_policy
from unstuck.domain.redaction import Redactor
from unstuck.domain.schedules import is_known_to
from unstuck.domain.states import HELD_STATES, LIVE_STATES, JobState, Transport
from unstuck.domain.worker_health import Disabled, Health, read_health
from unstuck.ledger.contract.admin import ApiTokenRecord, AuditRecord
from unstuck.ledger.contract.events import EventRecord
from unstuck.ledger.contract.jobs import AttemptRecord, JobRecord, JournalRecord, OutputRecord, Progress, SignalRecord
from unstuck.ledger.contract.queues import KeyRecord, QueueLimitRecord, QueueRecord
from unstuck.ledger.contract.schedules import ScheduleRecord, unpack_job
from unstuck.ledger.contract.workers import WorkerRecord, WorkerVerdict
from unstuck.ledger.contract.workflows import NodeRecord, WorkflowRecord

View = dict[str, Any]


def instant(at: float | None) -> str | None:
    """Write a time the way machines and people both read it."""
    if at is None:
        return None
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def job_summary(job: JobRecord) -> View:
    """A line of a list: everything but arguments, result and history."""
    return {
        "id": job.id,
        "task": job.task,
        "queue": job.queue,
        "state": job.state.value,
        "priority": job.priority,
        "error": error_view(job.error),
        "crash_count": job.crash_count,
        "failures": job.failures,
        "attempt": job.attempt,
        # Finished and waiting jobs are in nobody's hands; who had them is told by their attempts.
        "worker": job.worker_id if job.state in HELD_STATES else None,
        "unique_key": job.unique_key,
        "cancel_requested": job.cancel_requested,
        "enqueued_at": instant(job.enqueued_at),
        "enqueued_by": job.enqueued_by,
        "run_at": instant(job.run_at),
        "claimed_at": instant(job.claimed_at),
        "started_at": instant(job.started_at),
        "finished_at": instant(job.finished_at),
        "awaits": job.awaits_signal,
    }


def job_detail(
    job: JobRecord,
    attempts: list[AttemptRecord],
    events: list[EventRecord],
    names: Mapping[str, str],
    waiting: str | None,
    redact: Redactor,
    progress: Progress | None = None,
    workflow: View | None = None,
    journal: Sequence[JournalRecord] = (),
    signals: Sequence[SignalRecord] = (),
) -> View:
    """The whole of a job, but for secrets among its arguments; `names` are the names of workers by their ids,
    `workflow` is what it is a node of."""
    args, kwargs = shown_call(job, redact)
    values = SharedValues(redact)
    return {
        **job_summary(job),
        "args": args,
        "kwargs": kwargs,
        "result": result_view(job),
        "waiting": waiting,
        "progress": progress_view(progress),
        "workflow": workflow,
        "policy": policy_view(decode_policy(job.policy)),
        "attempts": [attempt_view(attempt, names) for attempt in attempts],
        "events": [event_view(event) for event in events],
        "journal": [entry_view(entry, values, job.id) for entry in journal],
        "signals": [signal_view(signal, values, job.id) for signal in signals],
    }


class SharedValues:
    """Values in JSON of one job, of which there may be thousands: all that are shown together are within the bound of
    one."""

    def __init__(self, redact: Redactor) -> None:
        self._redact = redact
        self._left = bounds.MAX_SHOWN

    def view(self, data: bytes, where: str) -> Any:
        """Return a value, or a note that it is too much to show, and `where` all of it is."""
        too_much = f"{TOO_MUCH[:-1]}; {where} has it)"
        if not data:
            return too_much
        try:
            used = count_json(data, replace(bounds.shown(data), values=self._left)) if begins_as_json(data) else 1
        except BoundExceeded:
            return too_much
        self._left = max(0, self._left - used)
        return self._redact(value_view(data, JSON))


def entry_view(entry: JournalRecord, values: SharedValues, job_id: int) -> View:
    """What a job wrote down; its checkpoint is the entry 0."""
    return {
        "seq": entry.seq,
        "kind": entry.kind,
        "name": entry.name,
        "value": values.view(entry.value, f"app.ledger.journal({job_id})"),
        "at": instant(entry.at),
        "token": entry.token,
    }


def signal_view(signal: SignalRecord, values: SharedValues, job_id: int) -> View:
    return {
        "number": signal.number,
        "name": signal.name,
        "value": values.view(signal.value, f"app.ledger.signals({job_id})"),
        "at": instant(signal.at),
        "by": signal.sent_by,
        "taken_seq": signal.taken_seq,
    }


def error_view(error: JobError | None) -> View | None:
    if error is None:
        return None
    return {
        "code": error.code,
        "type": error.type,
        "message": error.message,
        "cause": error.cause,
        "details": error.details,
    }


def attempt_view(attempt: AttemptRecord, names: Mapping[str, str]) -> View:
    return {
        "token": attempt.token,
        "worker": attempt.worker_id,
        "worker_name": names.get(attempt.worker_id),
        "state": attempt.state.value,
        "claimed_at": instant(attempt.claimed_at),
        "started_at": instant(attempt.started_at),
        "ended_at": instant(attempt.ended_at),
        "code": attempt.code,
        "cause": attempt.cause,
        "last_heartbeat_at": instant(attempt.last_heartbeat_at),
        "heartbeat_deadline": instant(attempt.heartbeat_deadline),
        "deadline": instant(attempt.deadline),
        "autopsy": autopsy_view(attempt.autopsy),
    }


def autopsy_view(autopsy: Autopsy | None) -> View | None:
    """What is not known is left out, as it is in the ledger."""
    return None if autopsy is None else msgspec.to_builtins(autopsy)


def progress_of(job: JobRecord, progress: Progress | None, attempts: Sequence[AttemptRecord]) -> Progress | None:
    """Return what the present try of a job said of its progress, if that is worth showing.

    What an earlier try said says nothing of this one, and a job that succeeded is done, whatever it said last. Of a try
    that died, the report of its death knows more than the ledger was told while it ran."""
    if job.state is JobState.SUCCEEDED or job.token is None:
        return None
    known = progress if progress is not None and progress.token == job.token else None
    if job.state is JobState.RUNNING:
        return known
    autopsy = next((one.autopsy for one in attempts if one.token == job.token), None)
    mark = None if autopsy is None else autopsy.progress
    if mark is not None and mark.at is not None:
        return Progress(job.id, job.token, mark.at, mark.done, mark.total, mark.message)
    return None if known is None else msgspec.structs.replace(known, busy_since=None)


def progress_view(progress: Progress | None) -> View | None:
    if progress is None:
        return None
    return {
        "at": instant(progress.at),
        "done": progress.done,
        "total": progress.total,
        "message": progress.message,
        "busy_since": instant(progress.busy_since),
    }


def event_view(event: EventRecord) -> View:
    return {
        "id": event.id,
        "at": instant(event.at),
        "kind": event.kind,
        "job_id": event.job_id,
        "worker": event.worker_id,
        "message": event.message,
    }


def output_view(output: OutputRecord) -> View:
    return {
        "token": output.token,
        "stdout": output.stdout.decode("utf-8", "replace"),
        "stderr": output.stderr.decode("utf-8", "replace"),
    }


def worker_view(worker: WorkerRecord) -> View:
    return {
        "id": worker.id,
        "name": worker.name,
        "host": worker.host,
        # Whoever comes over a network has no process that this number could name.
        "pid": worker.pid if worker.transport is Transport.PYTHON else None,
        "state": worker.state.value,
        "queues": list(worker.queues),
        "tasks": list(worker.tasks),
        "concurrency": worker.concurrency,
        "created_at": instant(worker.created_at),
        "last_seen_at": instant(worker.last_seen_at),
        "stopped_at": instant(worker.stopped_at),
        "silent_s": round(worker.silent_s, 3),
        "running": worker.busy,
        "held": worker.held,
        "processed": worker.processed,
        "version": worker.version,
        "metadata": worker.metadata,
        "verdict": verdict_view(worker.verdict),
        "request": worker.request,
        "heartbeat_interval_s": worker.heartbeat_interval_s,
        "suspect_after_s": worker.suspect_after_s,
        "health": msgspec.to_builtins(health_of(worker)),
        "disabled": disabled_view(worker.disabled),
        "door": worker.transport.value,
    }


def health_of(worker: WorkerRecord) -> Health:
    """Give what a worker says of itself; only our own weigh themselves."""
    return read_health(worker.metadata.get("health") if worker.transport is Transport.PYTHON else None)


def disabled_view(disabled: Disabled | None) -> View | None:
    if disabled is None:
        return None
    return {
        "reason": disabled.reason,
        "by": disabled.by,
        "at": instant(disabled.at),
        "auto": disabled.auto,
        "of_host": disabled.of_host,
    }


def verdict_view(verdict: WorkerVerdict | None) -> View | None:
    if verdict is None:
        return None
    return {
        "state": verdict.state.value,
        "detector": verdict.detector.value,
        "evidence": verdict.evidence,
        "silent_s": round(verdict.silent_s, 3),
        "by": verdict.by,
        "autopsy": autopsy_view(verdict.autopsy),
    }


def queue_view(queue: QueueRecord, limit: QueueLimitRecord | None = None) -> View:
    return {**msgspec.structs.asdict(queue), "limit": None if limit is None else limit_view(limit)}


def limit_view(record: QueueLimitRecord) -> View:
    limit = record.limit
    rate = None if limit.rate is None or limit.window_s is None else write_rate(limit.rate, limit.window_s)
    return {
        "queue": record.name,
        "concurrency": limit.concurrency,
        "rate": rate,
        "limited_by": record.limited_by,
        "held": record.held,
        "room": None if not limit else record.room,
        "next_in_s": record.in_s,
    }


def line_view(key: KeyRecord) -> View:
    return {
        "key": key.key,
        "limit": key.places,
        "limited_by": key.pinned_by,
        "blocked": key.blocked,
        "holders": [msgspec.structs.asdict(one) for one in key.holders],
    }


def policy_view(policy: Policy) -> View:
    view = msgspec.structs.asdict(policy)
    view["retry"] = msgspec.structs.asdict(policy.retry)
    # What it says is written into each job (`line`, `expires_at`, `hooks`).
    del view["order"]
    del view["hooks"]
    return view


def shown_call(job: JobRecord, redact: Redactor) -> tuple[Any, Any]:
    """Give (args, kwargs) without the values of what is called like a secret, by name or by place."""
    return redact.call(*call_view(job.payload, job.payload_type), decode_policy(job.policy))


def call_view(payload: bytes, payload_type: str) -> tuple[Any, Any]:
    """Give (args, kwargs) of a call in JSON or in frames; any other payload is one opaque argument."""
    if payload_type == FRAMES:
        return frames.show_call(payload)
    call = value_view(payload, payload_type)
    if isinstance(call, dict) and call.keys() <= {"args", "kwargs", "trace", "refs"}:
        refs = call.get("refs")
        return references_shown(payload) if refs else (call.get("args", []), call.get("kwargs", {}))
    return [call], {}


def references_shown(payload: bytes) -> tuple[Any, Any]:
    """Give (args, kwargs) of a node of a workflow, with a mark wherever the result of another node goes."""
    call = decode_call(payload)
    put_results(call, {place: {"$item": True} if place == ITEM else {"$node": place} for _, place in call.refs})
    return call.args, call.kwargs


def result_view(job: JobRecord) -> Any:
    if job.payload_type == FRAMES and job.result is not None and frames.is_packed(job.result):
        return frames.show_reply(job.result, job.payload)
    # Whoever works on a request over HTTP gives JSON.
    return value_view(job.result, JSON if job.payload_type == FRAMES else job.payload_type)


def whole_result(job: JobRecord) -> Any:
    """Return the result for a program that asked for it, however large: what is too much to show stays JSON as it is
    stored."""
    view = result_view(job)
    if view != TOO_MUCH or job.result is None:
        return view
    try:
        return msgspec.json.decode(job.result, type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError):
        return {"type": job.payload_type, "base64": base64.b64encode(job.result).decode("ascii")}


def value_view(data: bytes | None, payload_type: str) -> Any:
    if data is None:
        return None
    if payload_type == JSON:
        try:
            return decode_json(data, bounds.shown(data))
        except NotDecodable:
            return data.decode("utf-8", "replace")
        except BoundExceeded:
            return TOO_MUCH
    return {"type": payload_type, "base64": base64.b64encode(data).decode("ascii")}


def token_view(token: ApiTokenRecord) -> View:
    """A token without anything that it could be checked against."""
    return {
        "id": token.id,
        "name": token.name,
        "scopes": list(token.scopes),
        "valid": token.valid,
        "created_at": instant(token.created_at),
        "created_by": token.created_by,
        "expires_at": instant(token.expires_at),
        "revoked_at": instant(token.revoked_at),
    }


def audit_view(note: AuditRecord) -> View:
    return {
        "id": note.id,
        "at": instant(note.at),
        "by": note.by,
        "door": note.via,
        "verb": note.verb,
        "target": note.target,
        "outcome": note.outcome,
    }


def schedule_view(record: ScheduleRecord, workers: Sequence[WorkerRecord]) -> View:
    job = unpack_job(record.job)
    args, kwargs = call_view(job.payload, job.payload_type)
    return {
        "name": record.name,
        "task": record.task,
        "queue": record.queue,
        "priority": job.priority,
        "args": args,
        "kwargs": kwargs,
        "cron": record.timing.cron,
        "every_s": record.timing.every_s,
        "tz": record.timing.zone,
        "when": str(record.timing),
        "catch_up": record.catch_up,
        "source": record.source,
        "paused": record.paused,
        "paused_by": record.paused_by,
        "next_at": instant(record.next_at),
        "last_at": instant(record.last_at),
        "fired_at": instant(record.fired_at),
        "last_job_id": record.last_job_id,
        "changed_at": instant(record.changed_at),
        "workers": len(workers_firing(record, workers)),
    }


def workers_firing(record: ScheduleRecord, workers: Sequence[WorkerRecord]) -> list[WorkerRecord]:
    """Give the living workers that fire it: any of ours for what an operator made, else those with this very code."""
    ours = [worker for worker in workers if worker.state in LIVE_STATES and worker.transport is Transport.PYTHON]
    if record.source == "operator":
        return ours
    return [worker for worker in ours if is_known_to(worker.metadata, record.fingerprint)]


def workflow_summary(workflow: WorkflowRecord) -> View:
    """A line of a list. `counts` are those of nodes that have or had a job, or wait for one."""
    return {
        "id": workflow.id,
        "name": workflow.name,
        "state": workflow.state.value,
        "created_at": instant(workflow.created_at),
        "finished_at": instant(workflow.finished_at),
        "counts": dict(workflow.counts),
    }


def workflow_view(workflow: WorkflowRecord) -> View:
    """The whole of a workflow: its nodes in order of dependency, and who waits for whom."""
    whole = outline(workflow)
    nodes: list[View] = []
    for item in whole.items:
        _add(item, nodes)
    # Members of a map share the edges of their map.
    edges = [(source, node.place) for node in workflow.nodes if node.item is None for source in node.after]
    return {
        **workflow_summary(workflow),
        "counts": whole.counts,
        "headline": headline(workflow),
        "failed": [node_brief(node) for node in root_failures(workflow)],
        "nodes": nodes,
        "edges": [{"source": source, "target": target} for source, target in edges],
        "actions": [{"command": hint.command, "why": hint.why} for hint in hints(workflow)],
    }


def node_brief(node: NodeRecord) -> View:
    return {"place": node.place, "name": node.name, "job_id": node.job_id, "error": node.error}


def node_view(workflow: WorkflowRecord, place: int) -> View:
    """What a job says of the workflow that it is a node of; `node` is None where it stands for the whole."""
    node = next((node for node in workflow.nodes if node.place == place), None)
    return {
        "id": workflow.id,
        "name": workflow.name,
        "state": workflow.state.value,
        "node": None if node is None else node.name,
        "place": place,
        "after": [one.name for one in workflow.nodes if node is not None and one.place in node.after],
    }


def _add(item: Item, nodes: list[View]) -> None:
    node = item.node
    nodes.append(
        {
            "place": node.place,
            "parent": node.parent or None,
            "name": node.name,
            "kind": node.kind,
            "state": item.state,
            "on_error": node.on_error,
            "task": node.task,
            "job_id": node.job_id,
            "item": node.item,
            "after": list(node.after),
            "started_at": instant(item.started_at),
            "finished_at": instant(node.finished_at),
            "error": node.error,
            "counts": item.counts or None,
        }
    )
    for inside in item.inside:
        _add(inside, nodes)
