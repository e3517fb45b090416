"""From replies to results of jobs, and back."""

import base64
from collections.abc import Sequence
from typing import Any

import msgspec

from unstuck.domain.endings import Ending
from unstuck.domain.envelope import FRAMES, pack, read_note, read_value, unpack
from unstuck.domain.errors import RESULT_NOT_AVAILABLE, ErrorCode, PayloadError
from unstuck.domain.filling import with_results
from unstuck.domain.outcomes import Raised
from unstuck.domain.recovery import Attempt, conclude
from unstuck.store.records import Claimed, Outcome

USER_ERRORS = frozenset(
    {
        ErrorCode.TASK_FAILED.value,
        ErrorCode.DEADLINE_EXCEEDED.value,
        ErrorCode.STALLED.value,
        ErrorCode.RESULT_NOT_STORABLE.value,
        RESULT_NOT_AVAILABLE,
    }
)
CRASHES = frozenset({ErrorCode.WORKER_CRASHED.value, ErrorCode.OUT_OF_MEMORY.value, ErrorCode.CRASHED_TOO_OFTEN.value})


def result_of(job: Claimed, body: Sequence[bytes]) -> bytes:
    """Give what is stored: the frames as they came, or, for a job that was enqueued with JSON, JSON."""
    return pack(body) if job.payload_type == FRAMES else json_of(body)


def json_of(body: Sequence[bytes]) -> bytes:
    if len(body) == 1:
        try:
            return msgspec.json.encode(read_value(body[0]))
        except (TypeError, ValueError, UnicodeEncodeError, RecursionError):
            pass
    return msgspec.json.encode({"frames": [base64.b64encode(frame).decode("ascii") for frame in body]})


def body_of(result: bytes) -> list[bytes]:
    try:
        return unpack(result) or [b""]
    except PayloadError:
        return [result]


def request_of(job: Claimed) -> list[bytes]:
    """Give the body that a worker gets: the frames as they came, or the JSON of somebody's arguments."""
    if job.payload_type == FRAMES:
        return body_of(job.payload)
    # Only a node of a workflow has inputs; its worker need not know of the others.
    return [msgspec.json.encode(with_results(job.payload, job.inputs)) if job.inputs else job.payload]


def raised_in(error: bytes) -> Raised | None:
    """Read the error of one of our own workers; None where there is none."""
    found = read_note(error) if error else None
    if found is None or "error" not in found:
        return None
    return Raised(*(_text(found.get(name, "")) for name in ("error", "message", "traceback")))


def _text(said: object) -> str:
    # Of a stranger: some numbers of CBOR have more digits than Python writes.
    return said if isinstance(said, str) else type(said).__name__


def failed(attempt: Attempt, raised: Raised) -> Ending:
    return conclude(attempt, raised)


def is_crash(outcome: Outcome) -> bool:
    return outcome.error is not None and str(outcome.error.code) in CRASHES


def is_user_error(outcome: Outcome) -> bool:
    return outcome.error is not None and str(outcome.error.code) in USER_ERRORS


def cause(outcome: Outcome) -> str | None:
    return None if outcome.error is None else outcome.error.cause or outcome.error.message


def error_map(outcome: Outcome, own_id: str) -> dict[str, Any]:
    error = outcome.error
    return {
        "error": outcome.state.value.upper() if error is None else str(error.code),
        "message": "" if error is None else error.message,
        "job_id": own_id,
        "ledger_id": outcome.job_id,
    }
