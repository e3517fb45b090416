"""Steps of a job's story beside its attempts: actions of operators, journal entries, its workflow."""

from collections.abc import Sequence

from unstuck.client.views import value_view
from unstuck.client.why.story import RETRIED, Action, JobFacts, Quote, Step, StepKind
from unstuck.client.workflows.outline import root_failures
from unstuck.client.workflows.text import headline, hints, place_of, role, waits_for, why_not_begun
from unstuck.domain.events import EventKind
from unstuck.domain.journal import Kind
from unstuck.domain.payload import JSON
from unstuck.domain.states import FINAL_STATES
from unstuck.domain.units import in_words
from unstuck.domain.workflows import NodeState, WorkflowState
from unstuck.ledger.contract.events import EventRecord
from unstuck.ledger.contract.jobs import JournalRecord
from unstuck.ledger.contract.workflows import WorkflowRecord

OF_TRIES = frozenset({"requeued", "retrying", "failed", "cancelled", "quarantined", "suspended"})
"""Kinds that are written with the end of a try: the try itself tells more."""
SAME_WRITE_S = 1.0
"""The event of an end is written in the same commit; its clock may be read a little later."""


def happened(job_facts: JobFacts) -> list[Step]:
    return [_event_step(job_facts, event) for event in job_facts.events if not _is_of_a_try(job_facts, event)]


def _is_of_a_try(job_facts: JobFacts, event: EventRecord) -> bool:
    return event.kind in OF_TRIES and any(
        attempt.ended_at is not None
        and attempt.worker_id == event.worker_id
        and abs(attempt.ended_at - event.at) <= SAME_WRITE_S
        for attempt in job_facts.attempts
    )


def _event_step(job_facts: JobFacts, event: EventRecord) -> Step:
    facts = {"event": event.kind, "event_id": event.id, "worker": event.worker_id, "message": event.message}
    said = event.message.rstrip(".")
    queue = job_facts.job.queue
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


FIRST_ENTRIES = 20
LAST_ENTRIES = 20
"""Of a job with more, those in between are only counted."""


def wrote(job_facts: JobFacts) -> list[Step]:
    """Give every step that is done, and when; of many the first and the last."""
    entries = job_facts.journal
    left_out = len(entries) - FIRST_ENTRIES - LAST_ENTRIES
    if left_out <= 0:
        return [_entry_step(job_facts, entry) for entry in entries]
    first = entries[FIRST_ENTRIES]
    text = f"{left_out:,} entries of its journal are left out here; `unstuck job {job_facts.job.id}` lists them all."
    return [
        *(_entry_step(job_facts, entry) for entry in entries[:FIRST_ENTRIES]),
        Step(first.at, StepKind.OMITTED, text, {"entries": left_out}),
        *(_entry_step(job_facts, entry) for entry in entries[-LAST_ENTRIES:]),
    ]


def _entry_step(job_facts: JobFacts, entry: JournalRecord) -> Step:
    attempts = {attempt.token: number for number, attempt in enumerate(job_facts.attempts, 1)}
    facts = {"seq": entry.seq, "entry": entry.kind, "name": entry.name, "try": attempts.get(entry.token)}
    return Step(entry.at, StepKind.STEP, f"{_told(entry)}.", facts)


def _told(entry: JournalRecord) -> str:
    match entry.kind:
        case Kind.CHECKPOINT:
            return "Its last checkpoint was written"
        case Kind.SLEEP:
            asked_s = value_view(entry.value, JSON)
            return f"Began to sleep for {in_words(asked_s)}" if isinstance(asked_s, int | float) else "Began to sleep"
        case Kind.WAIT:
            return f"Began to wait for signal {entry.name!r}"
        case Kind.SIGNAL:
            return f"Took signal {entry.name!r}"
        case Kind.TIMEOUT:
            return f"Signal {entry.name!r} did not come in time"
        case _:
            return f"Step {entry.seq}, {entry.name!r}, is done and will not run again"


def done_steps(journal: Sequence[JournalRecord]) -> str:
    """Say how far it is by its journal; empty where it wrote nothing down."""
    names = [entry.name for entry in journal if entry.kind == Kind.STEP]
    if not names:
        return ""
    shown = ", ".join(names[-5:])
    more = "…, " if len(names) > 5 else ""
    count = "1 step of it is" if len(names) == 1 else f"{len(names):,} steps of it are"
    return f"{count} done ({more}{shown})."


BLAMED = 5
"""So many nodes that failed get a step of their own."""


def begun(job_facts: JobFacts, flow: WorkflowRecord) -> list[Step]:
    """Tell who started a workflow, which of its nodes failed, and what was not begun then."""
    job = job_facts.job
    members = [node for node in flow.nodes if node.item is None]
    who = f"{job.enqueued_by} started" if job.enqueued_by else "Somebody started"
    text = f"{who} it: the workflow {flow.name!r}, of {len(members):,} node{'' if len(members) == 1 else 's'}."
    facts = {"by": job.enqueued_by, "workflow": flow.id, "name": flow.name, "nodes": len(members)}
    steps = [Step(job.enqueued_at, StepKind.ENQUEUED, text, facts)]
    blamed = [node for node in root_failures(flow) if node.finished_at is not None]
    for node in blamed[:BLAMED]:
        error = node.error or {}
        said = (error.get("cause") or error.get("message") or "no cause was written down").rstrip(".")
        where = f" (job {node.job_id})" if node.job_id is not None else ""
        text = f"Node {node.name!r}{where} failed with {error.get('code', 'no code')}: {said}."
        assert node.finished_at is not None
        steps.append(Step(node.finished_at, StepKind.FAILED, text, {"node": node.name, "job": node.job_id, **error}))
    if len(blamed) > BLAMED:
        at = blamed[-1].finished_at or job.enqueued_at
        steps.append(Step(at, StepKind.OMITTED, f"{len(blamed) - BLAMED:,} more nodes failed.", {}))
    left = [node for node in flow.nodes if node.kind == "task" and node.state is NodeState.CANCELLED]
    ended = [node.finished_at for node in left if node.finished_at is not None]
    if ended:
        noun = "node was" if len(left) == 1 else "nodes were"
        text = f"{len(left):,} {noun} not begun, and {'is' if len(left) == 1 else 'are'} cancelled."
        steps.append(Step(max(ended), StepKind.CANCELLED, text, {"nodes": [node.name for node in left]}))
    if flow.state is WorkflowState.SUCCEEDED and flow.finished_at is not None:
        took = in_words(max(0.0, flow.finished_at - flow.created_at))
        text = f"Its last node ended, and so did the workflow, {took} after its start."
        steps.append(Step(flow.finished_at, StepKind.SUCCEEDED, text, {"workflow": flow.id}))
    return steps


def headline_of(flow: WorkflowRecord) -> str:
    return headline(flow)


def next_of(job_facts: JobFacts, flow: WorkflowRecord) -> str:
    if flow.state is WorkflowState.SUCCEEDED:
        return "Nothing: it is done."
    if job_facts.job.state in FINAL_STATES:
        return "Nothing by itself: it has ended, and goes on only if somebody takes it up again."
    return waits_for(flow)


def actions_of(flow: WorkflowRecord) -> tuple[Action, ...]:
    return tuple(Action(hint.command, hint.why) for hint in hints(flow))


def as_node(job_facts: JobFacts) -> str:
    """Say of a node which one it is and what hangs on it; empty for all other jobs."""
    flow, place = job_facts.context.flow, job_facts.context.place
    if flow is None or not place:
        return ""
    said = [f"It is {place_of(flow, place)}.", why_not_begun(flow, place), role(flow, place)]
    return " ".join(part for part in said if part)
