"""Show workflows as plain values, the same at every door. The fields are a contract: they are only added to."""

from unstuck.client.flow.outline import Item, culprits, outline
from unstuck.client.flow.words import headline, hints
from unstuck.client.views import View, instant
from unstuck.store.records import NodeRecord, WorkflowRecord


def workflow_summary(workflow: WorkflowRecord) -> View:
    """A line of a list. `counts` are those of nodes that have or had a job, or wait for one."""
    return {
        "id": workflow.id,
        "name": workflow.name,
        "state": workflow.state.value,
        "created_at": instant(workflow.created_at),
        "finished_at": instant(workflow.finished_at),
        "counts": dict(workflow.counts),
    }


def workflow_view(workflow: WorkflowRecord) -> View:
    """The whole of a workflow: its nodes in order of dependency, and who waits for whom."""
    whole = outline(workflow)
    nodes: list[View] = []
    for item in whole.items:
        _add(item, nodes)
    # Members of a map share the edges of their map.
    edges = [(source, node.place) for node in workflow.nodes if node.item is None for source in node.after]
    return {
        **workflow_summary(workflow),
        "counts": whole.counts,
        "headline": headline(workflow),
        "failed": [node_brief(node) for node in culprits(workflow)],
        "nodes": nodes,
        "edges": [{"source": source, "target": target} for source, target in edges],
        "actions": [{"command": hint.command, "why": hint.why} for hint in hints(workflow)],
    }


def node_brief(node: NodeRecord) -> View:
    return {"place": node.place, "name": node.name, "job_id": node.job_id, "error": node.error}


def node_view(workflow: WorkflowRecord, place: int) -> View:
    """What a job says of the workflow that it is a node of; `node` is None where it stands for the whole."""
    node = next((node for node in workflow.nodes if node.place == place), None)
    return {
        "id": workflow.id,
        "name": workflow.name,
        "state": workflow.state.value,
        "node": None if node is None else node.name,
        "place": place,
        "after": [one.name for one in workflow.nodes if node is not None and one.place in node.after],
    }


def _add(item: Item, nodes: list[View]) -> None:
    node = item.node
    nodes.append(
        {
            "place": node.place,
            "parent": node.parent or None,
            "name": node.name,
            "kind": node.kind,
            "state": item.state,
            "on_error": node.on_error,
            "task": node.task,
            "job_id": node.job_id,
            "item": node.item,
            "after": list(node.after),
            "started_at": instant(item.started_at),
            "finished_at": instant(node.finished_at),
            "error": node.error,
            "counts": item.counts or None,
        }
    )
    for inside in item.inside:
        _add(inside, nodes)
