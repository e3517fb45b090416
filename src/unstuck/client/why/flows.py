"""Tell of workflows in the story of a job: of the whole, where the job stands for it, and of its place as a node."""

from unstuck.client.flow.outline import culprits
from unstuck.client.flow.words import headline, hints, place_of, role, waits_for, why_not_begun
from unstuck.client.why.gathering import Evidence
from unstuck.client.why.story import Action, Step, StepKind
from unstuck.domain.durations import in_words
from unstuck.domain.states import FINAL
from unstuck.domain.workflow import NodeState, WorkflowState
from unstuck.store.records import WorkflowRecord

BLAMED = 5
"""So many nodes that failed get a step of their own."""


def begun(evidence: Evidence, flow: WorkflowRecord) -> list[Step]:
    """Tell who started a workflow, which of its nodes failed, and what was not begun then."""
    job = evidence.job
    members = [node for node in flow.nodes if node.item is None]
    who = f"{job.enqueued_by} started" if job.enqueued_by else "Somebody started"
    text = f"{who} it: the workflow {flow.name!r}, of {len(members):,} node{'' if len(members) == 1 else 's'}."
    facts = {"by": job.enqueued_by, "workflow": flow.id, "name": flow.name, "nodes": len(members)}
    steps = [Step(job.enqueued_at, StepKind.ENQUEUED, text, facts)]
    blamed = [node for node in culprits(flow) if node.finished_at is not None]
    for node in blamed[:BLAMED]:
        error = node.error or {}
        said = (error.get("cause") or error.get("message") or "no cause was written down").rstrip(".")
        where = f" (job {node.job_id})" if node.job_id is not None else ""
        text = f"Node {node.name!r}{where} failed with {error.get('code', 'no code')}: {said}."
        assert node.finished_at is not None
        steps.append(Step(node.finished_at, StepKind.FAILED, text, {"node": node.name, "job": node.job_id, **error}))
    if len(blamed) > BLAMED:
        at = blamed[-1].finished_at or job.enqueued_at
        steps.append(Step(at, StepKind.LEFT_OUT, f"{len(blamed) - BLAMED:,} more nodes failed.", {}))
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


def next_of(evidence: Evidence, flow: WorkflowRecord) -> str:
    if flow.state is WorkflowState.SUCCEEDED:
        return "Nothing: it is done."
    if evidence.job.state in FINAL:
        return "Nothing by itself: it has ended, and goes on only if somebody takes it up again."
    return waits_for(flow)


def actions_of(flow: WorkflowRecord) -> tuple[Action, ...]:
    return tuple(Action(hint.command, hint.why) for hint in hints(flow))


def as_node(evidence: Evidence) -> str:
    """Say of a node which one it is and what hangs on it; empty for all other jobs."""
    flow, place = evidence.around.flow, evidence.around.place
    if flow is None or not place:
        return ""
    said = [f"It is {place_of(flow, place)}.", why_not_begun(flow, place), role(flow, place)]
    return " ".join(part for part in said if part)
