"""Say how a job came to be, how long it waited, who took it, and how far it said it was."""

from typing import Any

from unstuck.client import views
from unstuck.client.flow.words import place_of
from unstuck.client.why.gathering import Evidence, Try
from unstuck.client.why.story import Step, StepKind
from unstuck.domain.autopsy import ProgressMark
from unstuck.domain.durations import in_words
from unstuck.domain.states import AttemptState
from unstuck.store.records import Progress

AT_ONCE_S = 0.05
SCHEDULED_S = 0.5
"""A job due later than this after its enqueue was scheduled; less is the time that the enqueue took."""


def enqueued(evidence: Evidence) -> Step:
    job = evidence.job
    who = f"{job.enqueued_by} enqueued it" if job.enqueued_by else "Somebody enqueued it"
    if evidence.around.flow is not None and evidence.around.place:
        # Nobody enqueues a node: whoever ended the last one that it waited for released it.
        who = f"As {place_of(evidence.around.flow, evidence.around.place)} it was released"
    parts = [f"{who} to queue {job.queue!r}"]
    if job.priority:
        parts.append(f"with priority {job.priority}")
    if job.unique_key is not None:
        parts.append(f"under the unique key {job.unique_key!r}")
    text = f"{' '.join(parts)}."
    facts: dict[str, Any] = {
        "by": job.enqueued_by,
        "queue": job.queue,
        "priority": job.priority,
        "unique_key": job.unique_key,
    }
    due = first_due(evidence)
    if due is not None:
        text += f" It was scheduled to run {in_words(due - job.enqueued_at)} later."
        facts["run_at"] = views.instant(due)
    return Step(job.enqueued_at, StepKind.ENQUEUED, text, facts)


def first_due(evidence: Evidence) -> float | None:
    """Give when a scheduled job was first due; None where it was due at once, or where a retry has overwritten it."""
    job = evidence.job
    moved = any(attempt.ended_at is not None and attempt.token != job.token for attempt in evidence.attempts)
    retried = any(event.kind in ("retried", "retrying", "requeued") for event in evidence.events)
    return job.run_at if not moved and not retried and job.run_at - job.enqueued_at > SCHEDULED_S else None


def taken(evidence: Evidence, one: Try) -> list[Step]:
    """Tell who claimed and started it, and how long it had waited by then."""
    attempt = one.attempt
    claimed = attempt.started_at if attempt.claimed_at is None else attempt.claimed_at
    if claimed is None:
        return []
    who, facts = worker_of(evidence, one)
    ready = max(one.waited_from, first_due(evidence) or 0.0) if one.number == 1 else one.waited_from
    waited_s = max(0.0, claimed - ready)
    facts |= {"try": one.number, "token": attempt.token, "waited_s": round(waited_s, 3)}
    after = f"after {in_words(waited_s)}" if waited_s > AT_ONCE_S else "at once"
    facts["claimed_at"] = views.instant(attempt.claimed_at)
    facts["started_at"] = views.instant(attempt.started_at)
    if attempt.started_at is None:
        text = f"Try {one.number}: {who} claimed it {after}; its code has not begun."
        return [Step(claimed, StepKind.CLAIMED, text, facts)]
    held_s = attempt.started_at - claimed
    if held_s <= AT_ONCE_S:
        text = f"Try {one.number}: {who} claimed and started it {after}."
    else:
        text = f"Try {one.number}: {who} claimed it {after} and started it {in_words(held_s)} later."
    return [Step(claimed, StepKind.STARTED, text, facts)]


def worker_of(evidence: Evidence, one: Try) -> tuple[str, dict[str, Any]]:
    """Name the worker of a try in words and in facts, also where retention has removed it."""
    worker = evidence.worker(one.attempt.worker_id)
    facts: dict[str, Any] = {"worker": one.attempt.worker_id}
    if worker is not None:
        facts |= {"worker_name": worker.name, "host": worker.host}
        return f"worker {worker.name} ({worker.id}) on {worker.host}", facts
    host = one.attempt.autopsy.host if one.attempt.autopsy is not None else None
    if host is not None:
        facts["host"] = host
    return f"worker {one.attempt.worker_id}{f' on {host}' if host else ''} (no longer in the ledger)", facts


def progressed(evidence: Evidence, one: Try) -> list[Step]:
    """Tell how far it said it was: a running try from the ledger, a dead one from its autopsy."""
    attempt = one.attempt
    mark: ProgressMark | Progress | None = None
    known = evidence.progress if evidence.progress and evidence.progress.token == attempt.token else None
    if attempt.state is AttemptState.RUNNING:
        mark = known
    elif attempt.autopsy is not None:
        # The ledger may know it too, if nobody could ask its worker any more.
        mark = attempt.autopsy.progress or known
    if mark is None or mark.at is None:
        return []
    # The clock of its host may differ from the ledger's: what it said while it ran stays within its run.
    at = max(mark.at, attempt.started_at or mark.at)
    at = at if attempt.ended_at is None else min(at, attempt.ended_at)
    facts: dict[str, Any] = {"try": one.number, "done": mark.done, "total": mark.total, "message": mark.message}
    how_far = far(mark)
    text = f"Its last word on its progress: {how_far}." if how_far else "Its last sign of life."
    return [Step(at, StepKind.PROGRESS, text, facts)]


def far(mark: ProgressMark | Progress) -> str:
    """Write how far a job said it was: `3 of 10 (30%), "third page"`; empty where it only gave a sign."""
    parts = []
    if mark.done is not None and mark.total:
        parts.append(f"{mark.done:,g} of {mark.total:,g} ({100 * mark.done / mark.total:.0f}%)")
    elif mark.done is not None:
        parts.append(f"{mark.done:,g} done")
    if mark.message:
        parts.append(f'"{mark.message}"')
    return ", ".join(parts)
