"""Enqueue what follows the ends of other jobs."""

from collections.abc import Sequence
from typing import Any

import apsw
import msgspec

from unstuck.domain.policy import EVENT, fires
from unstuck.domain.states import AttemptState, JobState
from unstuck.ledger.contract.jobs import JobExtras, NewJob
from unstuck.ledger.sqlite.database import fetch
from unstuck.ledger.sqlite.enqueue import insert_jobs


def fire_hooks(cursor: apsw.Cursor, ended: Sequence[tuple[int, AttemptState]]) -> set[str]:
    """Enqueue what these ends call for, in the transaction that wrote them; give the queues.

    Once per attempt and hook, since the fence lets every attempt end once."""
    rows = fetch(cursor, "hooked_among", (msgspec.json.encode([job_id for job_id, _ in ended]).decode(),))
    if not rows:
        return set()
    found = {row[0]: row for row in rows}
    jobs: list[NewJob] = []
    for job_id, attempt in ended:
        if job_id in found:
            jobs += _followers(found[job_id], attempt)
    if jobs:
        insert_jobs(cursor, jobs)
    return {job.queue for job in jobs}


def _followers(row: tuple[Any, ...], ended: AttemptState) -> list[NewJob]:
    job_id, task, queue, state, attempt, code, message, cause, text = row
    hooks = msgspec.json.decode(text)
    followers = []
    for kind in fires(ended, JobState(state)):
        event = {
            "kind": kind,
            "job_id": job_id,
            "task": task,
            "queue": queue,
            "state": state,
            "attempt": attempt,
            "code": code,
            "message": message,
            "cause": cause,
        }
        payload = msgspec.json.encode({"kwargs": {EVENT: event}})
        followers += [_follower(spec, payload, f"after_{kind} of job {job_id}") for spec in hooks.get(kind, ())]
    return followers


def _follower(spec: dict[str, Any], payload: bytes, by: str) -> NewJob:
    given = {name: value for name, value in spec.items() if name not in ("policy", "more")}
    return NewJob(
        **given,
        payload=payload,
        policy=spec.get("policy", "").encode(),
        enqueued_by=by,
        more=msgspec.convert(spec["more"], JobExtras) if "more" in spec else None,
    )
