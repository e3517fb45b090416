"""Say of a workflow and of its nodes, in whole sentences, how they stand, what they wait for, and what can be done."""

from collections.abc import Mapping, Sequence

import msgspec

from unstuck.client.workflows.outline import active_nodes, outline, paused_nodes, root_failures
from unstuck.domain.units import in_words
from unstuck.domain.workflows import NodeState, WorkflowState
from unstuck.ledger.contract.workflows import NodeRecord, WorkflowRecord

NAMED = 3
MAX_CAUSE_CHARS = 300


class Hint(msgspec.Struct, frozen=True):
    """A command that helps, and what it does."""

    command: str
    why: str


def summary(counts: Mapping[str, int]) -> str:
    """Write `97 of 100 succeeded, 2 running, 1 failed`."""
    total = sum(counts.values())
    parts = [f"{counts.get('succeeded', 0):,} of {total:,} succeeded"]
    # Where only nodes are counted, not their jobs, those that were released may wait for a slot or run.
    words = {"released": "begun"}
    parts += [f"{number:,} {words.get(state, state)}" for state, number in counts.items() if state != "succeeded"]
    return ", ".join(parts)


def named(nodes: Sequence[NodeRecord]) -> str:
    """Write `node 'total'`, `nodes 'a' and 'b'`, or the first few and how many more."""
    names = [repr(node.name) for node in nodes[:NAMED]]
    more = len(nodes) - len(names)
    if more:
        names.append(f"{more:,} more")
    joined = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    return f"node{'' if len(nodes) == 1 else 's'} {joined}"


def error_text(node: NodeRecord) -> str:
    """Give what went wrong with a node in one line; empty where nothing did."""
    if node.error is None:
        return ""
    said = node.error.get("cause") or node.error.get("message") or ""
    code = node.error.get("code") or ""
    return f"{code}: {said}"[:MAX_CAUSE_CHARS] if said else str(code)


def headline(workflow: WorkflowRecord) -> str:
    """Say how a whole workflow stands."""
    whole = outline(workflow)
    counts = summary(whole.counts)
    blamed = root_failures(workflow)
    match workflow.state:
        case WorkflowState.SUCCEEDED:
            took_s = max(0.0, (workflow.finished_at or workflow.created_at) - workflow.created_at)
            return f"It succeeded after {in_words(took_s)}: {counts}."
        case WorkflowState.FAILED:
            return f"It failed: {_blame(blamed)} {_not_begun(workflow)}{counts}."
        case WorkflowState.CANCELLED:
            return f"It was cancelled: {counts}."
        case WorkflowState.PAUSED:
            return f"It is paused: {_blame(paused_nodes(workflow))} An operator decides. Meanwhile {counts}."
        case WorkflowState.RUNNING:
            return f"It goes on: {counts}."


def waits_for(workflow: WorkflowRecord) -> str:
    """Say what a workflow that has not ended waits for."""
    if workflow.state is WorkflowState.PAUSED:
        return f"It waits for an operator: {_blame(paused_nodes(workflow))}"
    going = active_nodes(workflow)
    if not going:
        return "Nothing of it goes on just now; the reaper looks after it in its next rounds."
    running = [node for node in going if node.started_at is not None]
    first = (running or going)[:NAMED]
    jobs = ", ".join(f"{node.name!r} (job {node.job_id}, {_job_state(node)})" for node in first)
    more = len(going) - len(first)
    return f"It waits for its nodes: {jobs}{f' and {more:,} more' if more else ''}."


def hints(workflow: WorkflowRecord) -> list[Hint]:
    """Give the commands that help now, the likeliest first."""
    found = []
    blamed = root_failures(workflow)
    number = workflow.id
    if workflow.state is WorkflowState.PAUSED:
        paused = paused_nodes(workflow)
        again = f"tries {named(paused)} again" if paused else "takes it up again"
        found.append(Hint(f"unstuck workflows retry {number}", again))
        past = "goes on past what failed: those who depend on it get its error"
        found.append(Hint(f"unstuck workflows resume {number}", past))
    if workflow.state in (WorkflowState.FAILED, WorkflowState.CANCELLED):
        why = f"takes it up again from {named(blamed)}" if blamed else "takes it up again where it ended"
        found.append(Hint(f"unstuck workflows retry {number}", f"{why}; what succeeded is kept"))
    found += [
        Hint(f"unstuck why {node.job_id}", f"tells why node {node.name!r} failed")
        for node in blamed[:NAMED]
        if node.job_id is not None
    ]
    found.append(Hint(f"unstuck workflow {number}", "draws it with all of its nodes"))
    if workflow.finished_at is None:
        found.append(Hint(f"unstuck workflows cancel {number}", "gives it up; what runs is told to stop"))
    return found


def place_of(workflow: WorkflowRecord, place: int) -> str:
    """Say which node of which workflow a job is."""
    node = _node(workflow, place)
    what = f"node {node.name!r}" if node is not None else "a node"
    return f"{what} of workflow {workflow.id} ({workflow.name})"


def role(workflow: WorkflowRecord, place: int) -> str:
    """Say what came before a node, what comes after it, and what its failure means."""
    node = _node(workflow, place)
    if node is None:
        return ""
    by_place = {one.place: one for one in workflow.nodes}
    said = []
    before = [by_place[source] for source in node.after if source in by_place]
    if before:
        said.append(f"It comes after {named(before)}.")
    later = [one for one in workflow.nodes if place in one.after and one.item is None]
    if later:
        said.append(f"{_capital(named(later))} {'waits' if len(later) == 1 else 'wait'} for it.")
    if node.state is NodeState.PAUSED:
        said.append(f"Workflow {workflow.id} is paused until an operator decides what its failure means.")
    elif node.state is NodeState.FAILED and node.on_error == "continue":
        said.append("Those who depend on it go on with its error.")
    elif node in root_failures(workflow) and workflow.state is WorkflowState.FAILED:
        said.append(f"With it failed workflow {workflow.id}.")
    elif node.state is NodeState.FAILED:
        said.append("With it failed the group that it is in, which may fail.")
    return " ".join(said)


def why_not_begun(workflow: WorkflowRecord, place: int) -> str:
    """Say of a node that was cancelled which one failed before it; empty for all others."""
    node = _node(workflow, place)
    if node is None or node.state is not NodeState.CANCELLED:
        return ""
    blamed = root_failures(workflow)
    cause = (node.error or {}).get("cause") or ""
    if not blamed:
        return f"It was not begun: {cause}." if cause else ""
    return f"It was not begun because {_blame(blamed[:1])}"


def _blame(nodes: Sequence[NodeRecord]) -> str:
    if not nodes:
        return "which node failed is not known any more."
    first = nodes[0]
    facts = first.error or {}
    inner, job_id = facts.get("node") or first.name, first.job_id or facts.get("job_id")
    job = f" (job {job_id})" if job_id is not None else ""
    within = "" if inner == first.name else f", in the {first.kind} {first.name!r},"
    more = f"; {len(nodes) - 1:,} more failed" if len(nodes) > 1 else ""
    return f"node {inner!r}{job}{within} failed, {error_text(first).rstrip('.')}{more}."


def _not_begun(workflow: WorkflowRecord) -> str:
    left = [node for node in workflow.nodes if node.kind == "task" and node.state is NodeState.CANCELLED]
    if not left:
        return ""
    return f"{_capital(named(left))} {'was' if len(left) == 1 else 'were'} not begun. "


def _node(workflow: WorkflowRecord, place: int) -> NodeRecord | None:
    return next((node for node in workflow.nodes if node.place == place), None)


def _job_state(node: NodeRecord) -> str:
    return "not there any more" if node.job_state is None else node.job_state.value


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]
