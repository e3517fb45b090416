"""Say what people and caretakers did with a job between its tries: events that no try tells of."""

from unstuck.client.why.gathering import RETRIED, Evidence
from unstuck.client.why.story import Quote, Step, StepKind
from unstuck.domain.events import EventKind
from unstuck.store.records import EventRecord

OF_TRIES = frozenset({"requeued", "retrying", "failed", "cancelled", "quarantined", "suspended"})
"""Kinds that are written with the end of a try: the try itself tells more."""
SAME_WRITE_S = 1.0
"""The event of an end is written in the same commit; its clock may be read a little later."""


def happened(evidence: Evidence) -> list[Step]:
    return [_step(evidence, event) for event in evidence.events if not _is_of_a_try(evidence, event)]


def _is_of_a_try(evidence: Evidence, event: EventRecord) -> bool:
    return event.kind in OF_TRIES and any(
        attempt.ended_at is not None
        and attempt.worker_id == event.worker_id
        and abs(attempt.ended_at - event.at) <= SAME_WRITE_S
        for attempt in evidence.attempts
    )


def _step(evidence: Evidence, event: EventRecord) -> Step:
    facts = {"event": event.kind, "event_id": event.id, "worker": event.worker_id, "message": event.message}
    said = event.message.rstrip(".")
    queue = evidence.job.queue
    match event.kind:
        case "cancel_requested":
            return Step(event.at, StepKind.OPERATOR, f"{said}; its worker was rung.", facts)
        case kind if kind == RETRIED:
            return Step(event.at, StepKind.OPERATOR, f"{said}, with fresh counters; queue {queue!r} was rung.", facts)
        case EventKind.STACK:
            quote = Quote("where it stood", event.message)
            return Step(event.at, StepKind.EVENT, "Somebody asked where it stands.", facts, (quote,))
        case "cancelled" | EventKind.SIGNALLED:
            return Step(event.at, StepKind.OPERATOR, f"{said}.", facts)
        case _:
            return Step(event.at, StepKind.EVENT, f"{said}." if said else f"Event: {event.kind}.", facts)
