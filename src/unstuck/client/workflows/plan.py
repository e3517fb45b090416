"""Turn a workflow that was built into what the ledger stores: places, edges, and a job for each node."""

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from unstuck.client.enqueue import EnqueueOptions, build_job
from unstuck.client.workflows.nodes import Node, TaskNode
from unstuck.config import DEFAULT_QUEUE
from unstuck.domain.node_inputs import ITEM
from unstuck.domain.policy import Policy
from unstuck.domain.workflows import MAX_EDGES, TASK
from unstuck.errors import ConfigError
from unstuck.ledger.contract.workflows import NewEdge, NewNode, NewWorkflow

if TYPE_CHECKING:
    from unstuck.client.workflows.builder import Container, Workflow

Path = list[str | int]
ROOT_LIMIT_BYTES = 10_000


def plan(workflow: "Workflow", *, unique_key: str | None, priority: int) -> NewWorkflow:
    """Check the whole, and give it as it is stored."""
    members = list(_walk(workflow))
    if not members:
        raise ConfigError(f"Workflow {workflow.name!r} has no nodes. Add some before you start it.")
    for place, node in enumerate(members, start=1):
        node.place = place
    edges: dict[tuple[int, int], bool] = {}
    nodes = [NewNode(0, None, workflow.name, "group", source=_standing_for(workflow))]
    nodes += [_stored(node, edges) for node in members]
    _refuse_cycles(workflow, members, edges)
    root = build_job(
        task=TASK,
        queue=DEFAULT_QUEUE,
        policy=Policy(),
        options=EnqueueOptions.checked(None, {"unique_key": unique_key, "priority": priority}),
        args=(),
        kwargs={"workflow": workflow.name},
        limit_bytes=ROOT_LIMIT_BYTES,
        known_queues=None,
    )
    found = tuple(NewEdge(source, target, data) for (source, target), data in sorted(edges.items()))
    return NewWorkflow(workflow.name, root, tuple(nodes), found)


def _walk(scope: "Container") -> Iterator[Node[Any]]:
    for node in scope.members:
        yield node
        if node.kind == "group":
            yield from _walk(node)  # type: ignore[arg-type]


def _standing_for(scope: "Container") -> int | None:
    if not scope.members:
        raise ConfigError(f"Group {scope.name!r} is empty. Add nodes to it, or leave it out.")
    return (scope.chosen or scope.members[-1]).place


def _stored(node: Node[Any], edges: dict[tuple[int, int], bool]) -> NewNode:
    assert node.scope is not None
    parent = node.scope.place
    if not isinstance(node, TaskNode):
        # What a group comes after, all in it come after.
        for earlier in node.earlier:
            for member in _walk(node):  # type: ignore[arg-type]
                if member.kind != "group":
                    edges.setdefault((earlier.place, member.place), False)
            _check_edges(edges)
        return NewNode(node.place, parent, node.name, "group", node.policy, _standing_for(node))  # type: ignore[arg-type]
    for earlier in node.earlier:
        edges.setdefault((earlier.place, node.place), False)
    refs: list[tuple[Path, int]] = []
    given: dict[str, Any] = {"args": list(node.args), "kwargs": node.kwargs}
    if node.over is not None:
        given["args"].insert(0, None)
        refs.append((["args", 0], ITEM))
        edges[node.over.place, node.place] = True
    found: list[tuple[Path, int]] = []
    given = _emptied(given, [], found)
    for _, source in found:
        edges[source, node.place] = True
    refs += found
    job = node.task.job_for_node(tuple(given["args"]), given["kwargs"], refs)
    over = None if node.over is None else node.over.place
    _check_edges(edges)
    return NewNode(node.place, parent, node.name, node.kind, node.policy, over, job)  # type: ignore[arg-type]


def _check_edges(edges: Collection[object]) -> None:
    if len(edges) > MAX_EDGES:
        raise ConfigError(
            f"The nodes of this workflow wait for each other in more than {MAX_EDGES:,} ways. Put a node between two "
            "groups of them that all of the first come before, and all of the second after."
        )


def _emptied(value: Any, path: Path, refs: list[tuple[Path, int]]) -> Any:
    """Return a value with None where nodes stand, and note where that was. What has none in it is not copied."""
    if isinstance(value, Node):
        refs.append(([*path], value.place))
        return None
    emptied: dict[Any, Any] = {}
    for key, one in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(one, Node | dict | list | tuple):
            path.append(key)
            if (new := _emptied(one, path, refs)) is not one:
                emptied[key] = new
            path.pop()
    if not emptied:
        return value
    copy: Any = dict(value) if isinstance(value, dict) else list(value)
    for key, new in emptied.items():
        copy[key] = new
    return copy


def _refuse_cycles(workflow: "Workflow", members: list[Node[Any]], edges: dict[tuple[int, int], bool]) -> None:
    """A group ends after all that is in it; with that, nobody may come before itself."""
    before: dict[int, set[int]] = {node.place: set() for node in members}
    behind: dict[int, list[int]] = {node.place: [] for node in members}
    links = set(edges)
    for node in members:
        if node.scope is not workflow:
            assert node.scope is not None
            links.add((node.place, node.scope.place))
    for source, target in links:
        before[target].add(source)
        behind[source].append(target)
    ready = [place for place, sources in before.items() if not sources]
    while ready:
        place = ready.pop()
        del before[place]
        for target in behind[place]:
            before[target].discard(place)
            if not before[target]:
                ready.append(target)
    if before:
        names = ", ".join(repr(node.name) for node in members if node.place in before)
        raise ConfigError(f"Workflow {workflow.name!r} goes in a circle: {names} wait for each other.")
