"""Facts for tests of the page, with only what matters to them."""

from collections.abc import Iterable
from typing import Any

from tests.support.builders import worker_record

from unstuck.client.doctor.findings import Finding
from unstuck.domain.liveness import Detector
from unstuck.domain.states import AttemptState, JobState, WorkerState
from unstuck.http.dashboard.snapshot import Snapshot
from unstuck.ledger.contract.events import EventRecord
from unstuck.ledger.contract.jobs import AttemptRecord, JobRecord
from unstuck.ledger.contract.workers import WorkerRecord, WorkerVerdict


def worker(worker_id: str, name: str, state: WorkerState, died_at: float | None = None) -> WorkerRecord:
    verdict = WorkerVerdict(state, Detector.PEER, "its process no longer exists", 0.1, "w9")
    return worker_record(
        name,
        id=worker_id,
        host="h",
        pid=1,
        state=state,
        tasks=(),
        concurrency=1,
        last_seen_at=died_at or 0.0,
        stopped_at=died_at,
        version="1",
        verdict=verdict if state in (WorkerState.DEAD, WorkerState.SUSPECT) else None,
    )


def death_of_runner(job_id: int, at: float, cause: str, kind: str, message: str = "") -> EventRecord:
    said = f"Task re-queued: {cause}" if kind == "requeued" else f"WORKER_CRASHED: {cause}"
    return EventRecord(job_id, at, kind, job_id, "w1", message or said)


def snapshot(now_s: float, workers: Iterable[WorkerRecord], findings: Iterable[Finding] = ()) -> Snapshot:
    return Snapshot(
        at=now_s,
        workers=tuple(workers),
        queues=(),
        held=(),
        progress={},
        events=(),
        quarantined=0,
        tasks_of={},
        minutes=(),
        findings=tuple(findings),
        examined_at=now_s,
    )


def job(**times: Any) -> JobRecord:
    return JobRecord(
        id=1,
        task="add",
        queue="default",
        state=JobState.FAILED,
        priority=0,
        payload=b"",
        payload_type="json",
        result=None,
        error=None,
        policy=b"",
        failures=0,
        crash_count=0,
        attempt=1,
        unique_key=None,
        cancel_requested=False,
        enqueued_by=None,
        run_at=0.0,
        claimed_at=None,
        started_at=None,
        worker_id=None,
        token=None,
        **times,
    )


def attempt(token: int, **times: Any) -> AttemptRecord:
    return AttemptRecord(
        token=token,
        worker_id="w1",
        state=AttemptState.CRASHED,
        claimed_at=None,
        code=None,
        cause=None,
        last_heartbeat_at=None,
        heartbeat_deadline=None,
        deadline=None,
        **times,
    )
