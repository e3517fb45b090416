"""Turn rows into records."""

from typing import Any

import msgspec

from unstuck.domain.autopsy import decode_autopsy
from unstuck.domain.endings import JobError
from unstuck.domain.liveness import Session
from unstuck.domain.states import AttemptState, JobState, WorkerState
from unstuck.store.postgres.lanes import Row
from unstuck.store.records import AttemptRecord, HeldJob, JobRecord, Outcome, WorkerRecord, WorkerVerdict, WorkerWatch


def job_error(
    code: str | None, message: str | None, cause: str | None, details: dict[str, Any] | None
) -> JobError | None:
    return None if code is None else JobError(code, message or "", cause, details or {})


def job_record(row: Row) -> JobRecord:
    return JobRecord(*(*row[:3], JobState(row[3]), *row[4:8], job_error(*row[8:12]), *row[12:]))


def outcome(row: Row) -> Outcome:
    return Outcome(row[0], JobState(row[1]), row[2], job_error(*row[3:7]))


def held_job(row: Row) -> HeldJob:
    return HeldJob(*(*row[:3], JobState(row[3]), *row[4:]))


def attempt_record(row: Row) -> AttemptRecord:
    return AttemptRecord(*(*row[:2], AttemptState(row[2]), *row[3:11], decode_autopsy(row[11])))


def worker_watch(row: Row, session: Session) -> WorkerWatch:
    return WorkerWatch(*(*row[:8], WorkerState(row[8]), *row[9:13], session, *row[14:]))


def worker_record(row: Row) -> WorkerRecord:
    verdict = None if row[17] is None else msgspec.convert(row[17], WorkerVerdict)
    return WorkerRecord(*(*row[:4], WorkerState(row[4]), tuple(row[5]), tuple(row[6]), *row[7:17], verdict, *row[18:]))
