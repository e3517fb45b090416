"""Say in facts what became of a worker, and of an attempt that is no longer its own."""

from typing import Any

from unstuck.client.views import instant
from unstuck.domain.states import HELD_STATES, LIVE_STATES, WorkerState
from unstuck.http.problems import Problem
from unstuck.ledger.contract.jobs import Fate
from unstuck.ledger.contract.workers import WorkerRecord

Facts = dict[str, Any]


def death_of(worker: WorkerRecord) -> Facts:
    """Tell of a worker that is dead or stopped."""
    verdict = worker.verdict if worker.state is WorkerState.DEAD else None
    return {
        "id": worker.id,
        "state": worker.state.value,
        "at": instant(worker.stopped_at),
        "detector": verdict.detector.value if verdict else None,
        "evidence": verdict.evidence if verdict else None,
        "detail": sentence(worker),
    }


def sentence(worker: WorkerRecord) -> str:
    who, at = f"worker {worker.name} ({worker.id})", instant(worker.stopped_at)
    match worker.state:
        case WorkerState.DEAD if worker.verdict is not None:
            return f"{who} was declared dead at {at} ({worker.verdict.evidence}; {worker.verdict.detector})"
        case WorkerState.DEAD:
            return f"{who} was declared dead at {at}"
        case WorkerState.STOPPED:
            return f"{who} was shut down at {at}"
        case _:
            return f"{who} is {worker.state}"


def worker_gone_problem(worker: WorkerRecord, cure: str = "", **facts: Any) -> Problem:
    return Problem(
        409,
        "worker_gone",
        f"{_begin(sentence(worker))}. It holds nothing any more.",
        cure=cure or "Stop what it ran, and register anew: POST /api/v1/workers.",
        worker=death_of(worker),
        **facts,
    )


def superseded(fate: Fate, worker: WorkerRecord | None, *, may_look: bool) -> Facts:
    """Tell what happened to an attempt that a worker took for its own.

    `may_look`: the caller may look at any job. Else nothing is said of an attempt that was never this worker's: job ids
    are easy to guess."""
    parts = []
    if worker is not None and worker.state not in LIVE_STATES:
        parts.append(sentence(worker))
    not_its_own = f"job {fate.job_id} with token {fate.token} is not its own: given back, pruned, or never handed to it"
    parts.append(_of_job(fate) if may_look else not_its_own)
    return {
        "job_id": fate.job_id,
        "token": fate.token,
        "detail": _begin("; ".join(parts)) + ".",
        "job": _job_facts(fate) if may_look and fate.state is not None else None,
        "worker": None if worker is None or worker.state in LIVE_STATES else death_of(worker),
    }


def _of_job(fate: Fate) -> str:
    job_id, token = fate.job_id, fate.token
    if fate.state is None:
        return f"job {job_id} does not exist (it was pruned, or never stored)"
    if fate.state in HELD_STATES:
        if fate.holder_token == token:
            return f"job {job_id} is {fate.state} as token {token}, at worker {fate.holder_id}"
        who = str(fate.holder_id) if fate.holder_name is None else f"{fate.holder_name} ({fate.holder_id})"
        doing = "runs" if fate.started_at is not None else "is claimed"
        return f"job {job_id} was requeued and {doing} at worker {who} as token {fate.holder_token}"
    if fate.finished_at is not None:
        why = f" ({fate.error_code})" if fate.error_code is not None else ""
        whose = "this very token" if fate.holder_token == token else "another token"
        return f"job {job_id} {fate.state} at {instant(fate.finished_at)}{why}, by {whose}"
    return f"job {job_id} was requeued and waits to be taken"


def _job_facts(fate: Fate) -> Facts:
    return {
        "state": None if fate.state is None else fate.state.value,
        "token": fate.holder_token if fate.state in HELD_STATES else None,
        "worker": fate.holder_id if fate.state in HELD_STATES else None,
        "attempt": fate.attempt,
        "error": fate.error_code,
        "finished_at": instant(fate.finished_at),
    }


def _begin(text: str) -> str:
    return text[:1].upper() + text[1:]
