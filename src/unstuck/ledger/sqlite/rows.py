"""Turn rows into records."""

from collections.abc import Sequence
from typing import Any

import msgspec

from unstuck.domain.autopsy import decode_autopsy
from unstuck.domain.endings import JobError, missing_error
from unstuck.domain.liveness import Session, read_detector
from unstuck.domain.recovery_rules import read_rules
from unstuck.domain.states import AttemptState, JobState, Transport, WorkerState
from unstuck.domain.worker_health import Disabled, Standing, read_health
from unstuck.ledger.contract.jobs import AttemptRecord, JobRecord, Outcome
from unstuck.ledger.contract.recovery import WorkerWatch
from unstuck.ledger.contract.workers import HeldRecord, WorkerRecord, read_verdict
from unstuck.ledger.sqlite.clock import Clock

_disabled = msgspec.json.Decoder(Disabled)
Row = Sequence[Any]


def job_error(code: str | None, message: str | None, cause: str | None, details: str | None) -> JobError | None:
    if not code:
        return None
    return JobError(code, message or "", cause, msgspec.json.decode(details) if details else {})


def encode_details(error: JobError | None) -> str | None:
    return msgspec.json.encode(error.details).decode() if error is not None and error.details else None


def outcome(row: Row) -> Outcome:
    state = JobState(row[1])
    return Outcome(row[0], state, row[2], job_error(*row[3:7]) or missing_error(state, has_result=row[2] is not None))


def held_job(row: Row, clock: Clock) -> HeldRecord:
    claimed_at, started_at, started_boot_s, boot_id, beat_at = row[12:17]
    return HeldRecord(
        job_id=row[0],
        token=row[1],
        worker_id=row[2],
        state=JobState(row[3]),
        task=row[4],
        queue=row[5],
        policy=row[6],
        failures=row[7],
        crashes=row[8],
        cancel_requested=bool(row[9]),
        timeout_s=row[10],
        heartbeat_timeout_s=row[11],
        held_s=max(clock.at - claimed_at, 0.0) if claimed_at is not None else 0.0,
        running_s=clock.running_s(boot_id, started_boot_s, started_at),
        silent_s=clock.silent_s(beat_at),
        suspected_crashes=row[19],
        deferred=row[20] is not None and row[20] > clock.at,
    )


def worker_watch(row: Row, clock: Clock) -> WorkerWatch:
    suspect_boot_s = row[12]
    return WorkerWatch(
        id=row[0],
        name=row[1],
        host=row[2],
        pid=row[3],
        boot_id=row[4],
        pid_namespace=row[5],
        process_started=row[6],
        status_page=row[7],
        state=WorkerState(row[8]),
        silent_s=clock.counted_s(row[10]),
        since_beat_s=clock.since_s(row[10]),
        heartbeat_interval_s=row[9],
        suspect_after_s=row[11],
        waits_for_s=row[14],
        held=row[13],
        session=Session.UNKNOWN,
        suspect_s=0.0 if suspect_boot_s is None else max(clock.boot_s - suspect_boot_s, 0.0),
        shortest_s=row[15],
        transport=Transport(row[16]),
        suspected_by=read_detector(row[17]),
        rules=read_rules(row[18]),
    )


def job_record(row: Row, *, is_whole: bool = True) -> JobRecord:
    """Read a job; lists leave out its payload and its result."""
    return JobRecord(
        id=row[0],
        task=row[1],
        queue=row[2],
        state=(state := JobState(row[3])),
        priority=row[4],
        payload=row[5],
        payload_type=row[6],
        result=row[7],
        error=job_error(*row[8:12]) or missing_error(state, has_result=not is_whole or row[7] is not None),
        policy=row[12],
        failures=row[13],
        crash_count=row[14],
        attempt=row[15],
        unique_key=row[16],
        cancel_requested=bool(row[17]),
        enqueued_at=row[18],
        enqueued_by=row[19],
        run_at=row[20],
        claimed_at=row[21],
        started_at=row[22],
        finished_at=row[23],
        worker_id=row[24],
        token=row[25],
        suspected_crashes=row[26],
        run_alone=bool(row[27]),
        awaits_signal=row[28],
        wakes=bool(row[29]),
    )


def attempt_record(row: Row) -> AttemptRecord:
    return AttemptRecord(*(*row[:2], AttemptState(row[2]), *row[3:11], decode_autopsy(row[11])))


def worker_record(row: Row, clock: Clock) -> WorkerRecord:
    return WorkerRecord(
        id=row[0],
        name=row[1],
        host=row[2],
        pid=row[3],
        state=WorkerState(row[4]),
        queues=tuple(msgspec.json.decode(row[5])),
        tasks=tuple(msgspec.json.decode(row[6])),
        concurrency=row[7],
        created_at=row[8],
        last_seen_at=row[9],
        silent_s=clock.silent_s(row[9]),
        stopped_at=row[10],
        running=row[11],
        processed=row[12],
        held=row[13],
        version=row[14],
        metadata=msgspec.json.decode(row[15]),
        verdict=read_verdict(msgspec.json.decode(row[16])) if row[16] else None,
        request=row[17],
        heartbeat_interval_s=row[18],
        suspect_after_s=row[19],
        disabled=disabled_of(row[20], row[21]),
        transport=Transport(row[22]),
        owner=row[23],
        running_stale_after_s=row[24],
        rules=read_rules(row[25]),
        busy=row[26],
    )


def disabled_of(own: str | None, of_host: str | None) -> Disabled | None:
    """Give the flag that stands: the worker's own first."""
    if own is not None:
        return _disabled.decode(own)
    return None if of_host is None else msgspec.structs.replace(_disabled.decode(of_host), of_host=True)


def standing(row: Row, clock: Clock) -> Standing:
    return Standing(
        id=row[0],
        name=row[1],
        host=row[2],
        state=WorkerState(row[3]),
        queues=tuple(msgspec.json.decode(row[4])),
        tasks=tuple(msgspec.json.decode(row[5])),
        # Only our own workers weigh themselves.
        health=read_health(msgspec.json.decode(row[6]).get("health") if row[12] == Transport.PYTHON else None),
        disabled=disabled_of(row[7], row[8]),
        leaving=bool(row[9]),
        well=clock.silent_s(row[11]) < row[10],
        rules=read_rules(row[13]),
    )
