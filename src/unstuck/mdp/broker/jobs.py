"""Translate request frames to jobs, and jobs and results back to frames."""

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
_SEPARATOR = "\0"
"""Never part of a key that is stored as its client wrote it."""
LEAST_PRIORITY, MOST_PRIORITY = -1000, 1000


class Call(msgspec.Struct, frozen=True, gc=False):
    """One call of a request, which may have several."""

    job: NewJob
    own_id: str | None = None
    key: str | None = None
    """The idempotency key, as returned by `_key` or `_key_of_call`. Calls with the same key are done once."""
    concurrency_key: str | None = None
    """The concurrency key, if the client sent one."""


class CallOptions(msgspec.Struct, frozen=True, gc=False):
    priority: int = 0
    key: str | None = None
    own_id: str | None = None
    concurrency_key: str | None = None


def bare_policy(retry_attempts: int) -> Policy:
    """Return the policy of a service that is not a known task: up to `retry_attempts` retries after crashes."""
    return Policy(on_crash="retry" if retry_attempts else "fail", max_crash_retries=max(1, retry_attempts))


def read_calls(request: Request, tasks: Mapping[str, TaskRecord], retry_attempts: int, by: str) -> list[Call]:
    """Return the calls of a request. Frames that cannot be read are stored as they came."""
    service = request.service.decode("ascii")
    common = _options(read_fields(request.correlation, OPTIONS)) if request.correlation else CallOptions()
    maps = read_fields_of_all(request.body, OPTIONS) if len(request.body) > 1 else None
    if maps:
        # A map of options, then one map per call.
        options = _options(maps[0], common)
        calls = list(zip(request.body[1:], maps[1:], strict=True))
        # A map that is too large to look into is not read for its concurrency key either.
        known = tasks.get(service)
        otherwise = service if known is not None and _rules(known.policy).has_concurrency_key else None
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
    own_id = common.own_id
    if len(request.body) == 1:
        own_id = _own_id(_only(request.body[0])) or own_id
    options = CallOptions(common.priority, common.key, own_id, common.concurrency_key)
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
    """Return the same call with the policy of a task that was not known when it came."""
    job = call.job
    rules = _rules(known.policy)
    again = _job(job.task, known.queue, job.payload, rules, job.priority, job.enqueued_by or "", call.concurrency_key)
    return msgspec.structs.replace(call, job=again)


class _Rules(msgspec.Struct, frozen=True):
    policy: Policy
    encoded: bytes
    more: JobExtras | None
    """Extras that are the same for every job of the task."""

    @property
    def has_concurrency_key(self) -> bool:
        return self.policy.order.key is not None or self.policy.order.computed


@lru_cache(1_000)
def _rules(stored: bytes) -> _Rules:
    return _prepared(decode_policy(stored))


@lru_cache(10)
def _bare_rules(retry_attempts: int) -> _Rules:
    return _prepared(bare_policy(retry_attempts))


def _prepared(given: Policy) -> _Rules:
    policy, hooks = without_hooks(given)
    extras = JobExtras(hooks=hooks, expires_in_s=policy.order.expires_s, retain_s=policy.order.retain_s)
    return _Rules(policy, encode_policy(policy), None if extras == JobExtras() else extras)


def _job_extras(service: str, payload: bytes, rules: _Rules, concurrency_key: str | None) -> JobExtras | None:
    if concurrency_key is None and not rules.has_concurrency_key:
        return rules.more
    extras = rules.more or JobExtras()
    limit = rules.policy.order.limit if rules.has_concurrency_key else None
    return msgspec.structs.replace(
        extras,
        concurrency_key=concurrency_key or _concurrency_key(service, payload, rules.policy.order),
        concurrency_limit=limit,
    )


def _concurrency_key(service: str, payload: bytes, key_rule: KeyRule) -> str:
    """Return the concurrency key of a request.

    If it cannot be computed here, because only the app can or because arguments are missing, the name of the service
    is the key. Jobs then wait for each other without need, but none run together that must not."""
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


def _key(value: object) -> str | None:
    """Return the idempotency key to store. Different keys stay different: a long one is replaced by its hash."""
    value = _number(value)
    if isinstance(value, int | float):
        # In base 16, since a CBOR integer may have more digits than Python writes in base 10.
        value = str(value) if isinstance(value, float) or value.bit_length() <= MAX_OWN_ID_BITS else hex(value)
    if isinstance(value, str) and 0 < len(value) <= MAX_KEY_CHARS and _SEPARATOR not in value:
        return value
    if not isinstance(value, str | bytes) or not value:
        return None
    kind, data = ("text", value.encode("utf-8", "surrogatepass")) if isinstance(value, str) else ("bytes", value)
    return f"{_SEPARATOR}{kind} {hashlib.sha256(data).hexdigest()}"


def _number(value: object) -> object:
    """Return a whole number as an integer, since JavaScript clients send large ones as floats.

    None for booleans, infinite numbers and NaN, which count as missing."""
    if isinstance(value, bool) or (isinstance(value, float) and not isfinite(value)):
        return None
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _key_of_call(key: str | None, place: int) -> str | None:
    """Return the key of one of several calls, which no client can send as the key of a single one."""
    return None if key is None else f"{key}{_SEPARATOR}{place}"


def _only(frame: bytes) -> dict[str, Any] | None:
    """Return the options that the broker reads from a body, and nothing else of it."""
    found = read_fields(frame, OPTIONS)
    return read_json_fields(frame, OPTIONS) if found is None else found


def _own_id(parameters: dict[str, Any] | None) -> str | None:
    found = None if parameters is None else _number(parameters.get(OWN_ID))
    if isinstance(found, int) and found.bit_length() > MAX_OWN_ID_BITS:
        # A CBOR integer may have more digits than Python writes.
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
    """Return the result to store: the frames as they came, or JSON for a job that was enqueued as JSON."""
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
    """Return the body of the request to a worker: the frames as they came, or the arguments as JSON."""
    if job.payload_type == FRAMES:
        return body_of(job.payload)
    # Only a node of a workflow has inputs. Its worker need not know about workflows.
    return [msgspec.json.encode(call_with_results(job.payload, job.inputs)) if job.inputs else job.payload]


def raised_in(error: bytes) -> Raised | None:
    """Read the error that a worker of Unstuck reports; None if there is none."""
    found = read_note(error) if error else None
    if found is None or "error" not in found:
        return None
    return Raised(*(_text(found.get(name, "")) for name in ("error", "message", "traceback")))


def _text(value: object) -> str:
    # It may be anything: some CBOR integers have more digits than Python writes.
    return value if isinstance(value, str) else type(value).__name__


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
