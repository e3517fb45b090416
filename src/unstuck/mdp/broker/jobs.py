"""From request frames to jobs, and from jobs and results back to frames."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import isfinite
from typing import Any

import msgspec

from unstuck.domain.endings import Attempt, Ending, Raised, conclude, storable_text
from unstuck.domain.frames import (
    FRAMES,
    OWN_ID,
    named_arguments,
    pack_frames,
    read_fields,
    read_fields_of_all,
    read_json_fields,
    read_note,
    read_value,
    unpack_frames,
)
from unstuck.domain.limits import KeyRule, concurrency_key_of, names_in_key
from unstuck.domain.policy import Policy, decode_policy, encode_policy, without_hooks
from unstuck.domain.workflows import call_with_results
from unstuck.errors import RESULT_NOT_AVAILABLE, ConfigError, ErrorCode, PayloadError
from unstuck.ledger.contract.jobs import JobExtras, NewJob, Outcome, TaskRecord
from unstuck.ledger.contract.workers import Claimed
from unstuck.mdp.protocol import Request

MAX_KEY_CHARS = 200
MAX_CONCURRENCY_KEY_CHARS = 500
MAX_OWN_ID_CHARS = 200
MAX_OWN_ID_BITS = 128
OPTIONS = ("priority", "idempotency_key", "job_id", "concurrency_key", OWN_ID)
_MARK = "\0"
"""In no key that is kept as its client wrote it."""
LEAST_PRIORITY, MOST_PRIORITY = -1000, 1000


class Call(msgspec.Struct, frozen=True, gc=False):
    """One thing to be done; a request may carry several."""

    job: NewJob
    own_id: str | None = None
    key: str | None = None
    """The idempotency key, as `_key` and `_key_of_call` write it: with the same one the call is done once."""
    concurrency_key: str | None = None
    """The concurrency key, where its client said one."""


class CallOptions(msgspec.Struct, frozen=True, gc=False):
    priority: int = 0
    key: str | None = None
    own_id: str | None = None
    concurrency_key: str | None = None


def bare_policy(retry_attempts: int) -> Policy:
    """Give the rule of a service that nobody registered as a task: a crash sends it back, so often and no more."""
    return Policy(on_crash="retry" if retry_attempts else "fail", max_crash_retries=max(1, retry_attempts))


def read_calls(request: Request, tasks: Mapping[str, TaskRecord], retry_attempts: int, by: str) -> list[Call]:
    """Give the calls of a request. Whatever cannot be read is body, and kept as it came."""
    service = request.service.decode("ascii")
    said = _options(read_fields(request.correlation, OPTIONS)) if request.correlation else CallOptions()
    maps = read_fields_of_all(request.body, OPTIONS) if len(request.body) > 1 else None
    if maps:
        # A map of options, then one map per call.
        options = _options(maps[0], said)
        calls = list(zip(request.body[1:], maps[1:], strict=True))
        # What is too much to look into is not read for its concurrency key either.
        otherwise = service if (known := tasks.get(service)) is not None and _rules(known.policy).has_lines else None
        return [
            _call(
                service,
                (request.body[0], frame),
                tasks,
                retry_attempts,
                by,
                CallOptions(
                    options.priority,
                    _key_of_call(options.key, place),
                    _own_id(value) or options.own_id,
                    options.concurrency_key or (otherwise if value is None else None),
                ),
            )
            for place, (frame, value) in enumerate(calls)
        ]
    own_id = said.own_id
    if len(request.body) == 1:
        own_id = _own_id(_only(request.body[0])) or own_id
    options = CallOptions(said.priority, said.key, own_id, said.concurrency_key)
    return [_call(service, request.body, tasks, retry_attempts, by, options)]


def _call(
    service: str,
    frames: tuple[bytes, ...],
    tasks: Mapping[str, TaskRecord],
    retry_attempts: int,
    by: str,
    options: CallOptions,
) -> Call:
    known = tasks.get(service)
    rules = _bare_rules(retry_attempts) if known is None else _rules(known.policy)
    queue, payload = service if known is None else known.queue, pack_frames(frames)
    job = _job(service, queue, payload, rules, options.priority, by, options.concurrency_key)
    return Call(job, options.own_id, options.key, options.concurrency_key)


def as_task(call: Call, known: TaskRecord) -> Call:
    """Give the same call by the rules of a task that was not known when it came."""
    job = call.job
    rules = _rules(known.policy)
    again = _job(job.task, known.queue, job.payload, rules, job.priority, job.enqueued_by or "", call.concurrency_key)
    return msgspec.structs.replace(call, job=again)


class _Rules(msgspec.Struct, frozen=True):
    policy: Policy
    encoded: bytes
    more: JobExtras | None
    """What is the same for every job of the task."""

    @property
    def has_lines(self) -> bool:
        return self.policy.order.key is not None or self.policy.order.computed


@lru_cache(1_000)
def _rules(stored: bytes) -> _Rules:
    return _made(decode_policy(stored))


@lru_cache(10)
def _bare_rules(retry_attempts: int) -> _Rules:
    return _made(bare_policy(retry_attempts))


def _made(given: Policy) -> _Rules:
    policy, hooks = without_hooks(given)
    ties = JobExtras(hooks=hooks, expires_in_s=policy.order.expires_s, keep_s=policy.order.retain_s)
    return _Rules(policy, encode_policy(policy), None if ties == JobExtras() else ties)


def _job_extras(service: str, payload: bytes, rules: _Rules, concurrency_key: str | None) -> JobExtras | None:
    if concurrency_key is None and not rules.has_lines:
        return rules.more
    ties = rules.more or JobExtras()
    limit = rules.policy.order.limit if rules.has_lines else None
    return msgspec.structs.replace(
        ties, line=concurrency_key or _concurrency_key(service, payload, rules.policy.order), line_limit=limit
    )


def _concurrency_key(service: str, payload: bytes, key_rule: KeyRule) -> str:
    """Give the line in which a request stands. Where nobody can say its key, because the app computes it or the body
    has no such arguments, all of those stand in one line: better one after the other than two that should not meet."""
    try:
        return concurrency_key_of(key_rule, (), named_arguments(payload, names_in_key(key_rule)), service) or service
    except (ConfigError, PayloadError):
        return service


def _job(
    service: str, queue: str, payload: bytes, rules: _Rules, priority: int, by: str, concurrency_key: str | None
) -> NewJob:
    policy = rules.policy
    return NewJob(
        task=service,
        queue=queue,
        payload=payload,
        payload_type=FRAMES,
        policy=rules.encoded,
        on_crash=policy.on_crash,
        heartbeat=policy.heartbeat,
        heartbeat_timeout_s=policy.heartbeat_timeout_s,
        timeout_s=policy.timeout_s,
        priority=priority,
        enqueued_by=by,
        more=_job_extras(service, payload, rules, concurrency_key),
    )


def _options(given: dict[str, Any] | None, before: CallOptions | None = None) -> CallOptions:
    before = before or CallOptions()
    if given is None:
        return before
    priority = _number(given.get("priority", before.priority))
    key = given.get("idempotency_key", before.key)
    own_id = given.get("job_id", before.own_id)
    concurrency_key = given.get("concurrency_key", before.concurrency_key)
    return CallOptions(
        min(max(priority, LEAST_PRIORITY), MOST_PRIORITY) if isinstance(priority, int) else before.priority,
        _key(key) or before.key,
        storable_text(own_id, MAX_OWN_ID_CHARS) if isinstance(own_id, str) and own_id else before.own_id,
        storable_text(concurrency_key[:MAX_CONCURRENCY_KEY_CHARS], MAX_CONCURRENCY_KEY_CHARS)
        if isinstance(concurrency_key, str) and concurrency_key
        else before.concurrency_key,
    )


def _key(said: object) -> str | None:
    """Return an idempotency key such that different keys stay different: a long one becomes its hash."""
    said = _number(said)
    if isinstance(said, int | float):
        # In base 16: a number of CBOR may have more digits than Python writes in base 10.
        said = str(said) if isinstance(said, float) or said.bit_length() <= MAX_OWN_ID_BITS else hex(said)
    if isinstance(said, str) and 0 < len(said) <= MAX_KEY_CHARS and _MARK not in said:
        return said
    if not isinstance(said, str | bytes) or not said:
        return None
    kind, data = ("text", said.encode("utf-8", "surrogatepass")) if isinstance(said, str) else ("bytes", said)
    return f"{_MARK}{kind} {hashlib.sha256(data).hexdigest()}"


def _number(said: object) -> object:
    """Return a whole number as an integer: clients in JavaScript send large ones as floats. A truth value, an infinite
    number and NaN count as left out."""
    if isinstance(said, bool) or (isinstance(said, float) and not isfinite(said)):
        return None
    return int(said) if isinstance(said, float) and said.is_integer() else said


def _key_of_call(key: str | None, place: int) -> str | None:
    """Return the key of one of several calls: no client can send it as the key of a single one."""
    return None if key is None else f"{key}{_MARK}{place}"


def _only(frame: bytes) -> dict[str, Any] | None:
    """Return what the broker itself wants to know of a body; the rest of it is not read here."""
    found = read_fields(frame, OPTIONS)
    return read_json_fields(frame, OPTIONS) if found is None else found


def _own_id(parameters: dict[str, Any] | None) -> str | None:
    found = None if parameters is None else _number(parameters.get(OWN_ID))
    if isinstance(found, int) and found.bit_length() > MAX_OWN_ID_BITS:
        # A number of CBOR may have more digits than Python writes.
        return None
    return storable_text(str(found), MAX_OWN_ID_CHARS) if isinstance(found, str | int) and found != "" else None


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
    return pack_frames(body) if job.payload_type == FRAMES else json_of(body)


def json_of(body: Sequence[bytes]) -> bytes:
    if len(body) == 1:
        try:
            return msgspec.json.encode(read_value(body[0]))
        except (TypeError, ValueError, UnicodeEncodeError, RecursionError):
            pass
    return msgspec.json.encode({"frames": [base64.b64encode(frame).decode("ascii") for frame in body]})


def body_of(result: bytes) -> list[bytes]:
    try:
        return unpack_frames(result) or [b""]
    except PayloadError:
        return [result]


def request_of(job: Claimed) -> list[bytes]:
    """Give the body that a worker gets: the frames as they came, or the JSON of somebody's arguments."""
    if job.payload_type == FRAMES:
        return body_of(job.payload)
    # Only a node of a workflow has inputs; its worker need not know of the others.
    return [msgspec.json.encode(call_with_results(job.payload, job.inputs)) if job.inputs else job.payload]


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
