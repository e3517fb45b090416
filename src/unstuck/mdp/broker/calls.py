"""From frames to jobs: read what a client asks for, and what it says about it beside."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec

from unstuck.domain.envelope import FRAMES, pack, read_map, read_object
from unstuck.domain.meaning import OWN_ID
from unstuck.domain.policy import Policy, decode_policy, encode_policy, without_hooks
from unstuck.domain.recovery import printable
from unstuck.mdp.frames import Request
from unstuck.store.records import NewJob, TaskRecord, Ties

MAX_KEY_CHARS = 200
MAX_OWN_ID_CHARS = 200
MAX_OWN_ID_BITS = 128
LEAST_PRIORITY, MOST_PRIORITY = -1000, 1000


class Call(msgspec.Struct, frozen=True, gc=False):
    """One thing to be done; a request may carry several."""

    job: NewJob
    own_id: str | None = None
    key: str | None = None
    """With the same key from the same client it is done once."""


class Options(msgspec.Struct, frozen=True, gc=False):
    priority: int = 0
    key: str | None = None
    own_id: str | None = None


def bare_policy(retry_attempts: int) -> Policy:
    """Give the rule of a service that nobody registered as a task: a crash sends it back, so often and no more."""
    return Policy(on_crash="retry" if retry_attempts else "fail", max_crash_retries=max(1, retry_attempts))


def read_calls(request: Request, tasks: Mapping[str, TaskRecord], retry_attempts: int, by: str) -> list[Call]:
    """Give the calls of a request. Whatever cannot be read is body, and kept as it came."""
    service = request.service.decode("ascii")
    said = _options(read_map(request.correlation)) if request.correlation else Options()
    maps = [read_map(frame) for frame in request.body] if len(request.body) > 1 else []
    if maps and all(one is not None for one in maps):
        # A map of options, then one map per call.
        options = _options(maps[0], said)
        calls = [(frame, value) for frame, value in zip(request.body[1:], maps[1:], strict=True)]
        return [
            _call(
                service,
                (request.body[0], frame),
                tasks,
                retry_attempts,
                by,
                Options(options.priority, options.key and f"{options.key}#{place}", _own_id(value) or options.own_id),
            )
            for place, (frame, value) in enumerate(calls)
        ]
    own_id = said.own_id
    if len(request.body) == 1:
        own_id = _own_id(read_object(request.body[0])) or own_id
    options = Options(said.priority, said.key, own_id)
    return [_call(service, request.body, tasks, retry_attempts, by, options)]


def _call(
    service: str,
    frames: tuple[bytes, ...],
    tasks: Mapping[str, TaskRecord],
    retry_attempts: int,
    by: str,
    options: Options,
) -> Call:
    known = tasks.get(service)
    rules = _bare_rules(retry_attempts) if known is None else _rules(known.policy)
    return Call(
        _job(service, service if known is None else known.queue, pack(frames), rules, options.priority, by),
        options.own_id,
        options.key,
    )


def as_task(call: Call, known: TaskRecord) -> Call:
    """Give the same call by the rules of a task that was not known when it came."""
    job = call.job
    rules = _rules(known.policy)
    return msgspec.structs.replace(
        call, job=_job(job.task, known.queue, job.payload, rules, job.priority, job.enqueued_by or "")
    )


class _Rules(msgspec.Struct, frozen=True):
    policy: Policy
    encoded: bytes
    more: Ties | None


@lru_cache(1_000)
def _rules(stored: bytes) -> _Rules:
    return _made(decode_policy(stored))


@lru_cache(10)
def _bare_rules(retry_attempts: int) -> _Rules:
    return _made(bare_policy(retry_attempts))


def _made(given: Policy) -> _Rules:
    policy, hooks = without_hooks(given)
    return _Rules(policy, encode_policy(policy), None if hooks is None else Ties(hooks=hooks))


def _job(service: str, queue: str, payload: bytes, rules: _Rules, priority: int, by: str) -> NewJob:
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
        more=rules.more,
    )


def _options(given: dict[str, Any] | None, before: Options | None = None) -> Options:
    before = before or Options()
    if given is None:
        return before
    priority = given.get("priority", before.priority)
    key = given.get("idempotency_key", before.key)
    own_id = given.get("job_id", before.own_id)
    return Options(
        min(max(priority, LEAST_PRIORITY), MOST_PRIORITY)
        if isinstance(priority, int) and not isinstance(priority, bool)
        else before.priority,
        printable(key, MAX_KEY_CHARS) if isinstance(key, str) and key else before.key,
        printable(own_id, MAX_OWN_ID_CHARS) if isinstance(own_id, str) and own_id else before.own_id,
    )


def _own_id(parameters: dict[str, Any] | None) -> str | None:
    found = None if parameters is None else parameters.get(OWN_ID)
    if isinstance(found, int) and found.bit_length() > MAX_OWN_ID_BITS:
        # A number of CBOR may have more digits than Python writes.
        return None
    return printable(str(found), MAX_OWN_ID_CHARS) if isinstance(found, str | int) and found != "" else None
