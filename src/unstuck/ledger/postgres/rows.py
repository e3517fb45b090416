"""Turn rows into records."""

import math
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
from unstuck.ledger.postgres.connection import Row


def job_error(
    code: str | None, message: str | None, cause: str | None, details: dict[str, Any] | None
) -> JobError | None:
    return None if not code else JobError(code, message or "", cause, details or {})


def job_record(row: Row, *, is_whole: bool = True) -> JobRecord:
    """Read a job; lists leave out its payload and its result."""
    state = JobState(row[3])
    error = job_error(*row[8:12]) or missing_error(state, has_result=not is_whole or row[7] is not None)
    return JobRecord(*(*row[:3], state, *row[4:8], error, *row[12:]))


def outcome(row: Row) -> Outcome:
    state = JobState(row[1])
    return Outcome(row[0], state, row[2], job_error(*row[3:7]) or missing_error(state, has_result=row[2] is not None))


def held_job(row: Row) -> HeldRecord:
    return HeldRecord(*(*row[:3], JobState(row[3]), *row[4:]))


def attempt_record(row: Row) -> AttemptRecord:
    return AttemptRecord(*(*row[:2], AttemptState(row[2]), *row[3:11], decode_autopsy(row[11])))


def worker_watch(row: Row, session: Session) -> WorkerWatch:
    facts = (*row[:8], WorkerState(row[8]), *row[9:13], session, *row[14:16], Transport(row[16]), *row[17:19])
    doubted_s = math.inf if row[22] is None else row[22]
    return WorkerWatch(*(*facts, read_detector(row[19]), row[20], read_rules(row[21]), doubted_s, *row[23:25]))


def worker_record(row: Row) -> WorkerRecord:
    facts = (
        *row[:4],
        WorkerState(row[4]),
        tuple(row[5]),
        tuple(row[6]),
        *row[7:17],
        read_verdict(row[17]),
        *row[18:21],
    )
    newer = (disabled_of(row[21], row[22]), Transport(row[23]), *row[24:26], read_rules(row[26]), row[27])
    return WorkerRecord(*(*facts, *newer))


def disabled_of(own: dict[str, Any] | None, of_host: dict[str, Any] | None) -> Disabled | None:
    """Give the flag that stands: the worker's own first."""
    if own is not None:
        return msgspec.convert(own, Disabled)
    return None if of_host is None else msgspec.convert({**of_host, "of_host": True}, Disabled)


def standing(row: Row) -> Standing:
    return Standing(
        id=row[0],
        name=row[1],
        host=row[2],
        state=WorkerState(row[3]),
        queues=tuple(row[4]),
        tasks=tuple(row[5]),
        health=read_health(row[6]),
        disabled=disabled_of(row[7], row[8]),
        leaving=row[9],
        well=row[10],
        rules=read_rules(row[11]),
    )
