"""Put the nodes of a workflow in order: what is in what, what comes after what, and how each stands."""

from collections import Counter as Tally
from collections.abc import Iterable, Iterator

import msgspec

from unstuck.domain.states import HELD_STATES, JobState
from unstuck.domain.workflows import NodeState
from unstuck.ledger.contract.workflows import NodeRecord, WorkflowRecord

ORDER = (
    *("succeeded", "running", "claimed", "pending", "released"),
    *("paused", "failed", "quarantined", "cancelled", "waiting"),
)
"""In which order the states of many nodes are told."""


class Item(msgspec.Struct, frozen=True):
    """One node with what is inside it."""

    node: NodeRecord
    state: str
    """How it stands in one word: of a task that was released, how its job does."""
    inside: tuple["Item", ...]
    after: tuple[int, ...]
    """The places of those in the same scope that it, or something in it, waits for."""
    layer: int
    """How many stand before it in its scope, one after the other."""
    started_at: float | None
    counts: dict[str, int]
    """Of a group or map, how many tasks in it are in which state."""

    def tasks(self) -> Iterator["Item"]:
        if self.node.kind == "task":
            yield self
        for item in self.inside:
            yield from item.tasks()


class Outline(msgspec.Struct, frozen=True):
    workflow: WorkflowRecord
    items: tuple[Item, ...]
    """Those of the outermost scope, each after all that it waits for."""
    nodes: dict[int, NodeRecord]
    """By place."""

    def tasks(self) -> Iterator[Item]:
        for item in self.items:
            yield from item.tasks()

    @property
    def counts(self) -> dict[str, int]:
        return counted(self.tasks())


def outline(workflow: WorkflowRecord) -> Outline:
    nodes = {node.place: node for node in workflow.nodes}
    inside: dict[int, list[NodeRecord]] = {}
    for node in workflow.nodes:
        inside.setdefault(node.parent or 0, []).append(node)
    items = _items(0, inside, nodes, _lifted(workflow.nodes, nodes))
    return Outline(workflow, items, nodes)


def _lifted(nodes: Iterable[NodeRecord], known: dict[int, NodeRecord]) -> dict[int, set[int]]:
    """Let a scope wait for what something in it waits for outside: so each scope has an order of its own."""
    after: dict[int, set[int]] = {}
    for node in nodes:
        for source in node.after:
            scope = known[source].parent if source in known else None
            at: NodeRecord | None = node
            while at is not None and at.parent != scope:
                at = known.get(at.parent) if at.parent else None
            if at is not None and at.place != source:
                after.setdefault(at.place, set()).add(source)
    return after


def _items(
    scope: int, inside: dict[int, list[NodeRecord]], known: dict[int, NodeRecord], after: dict[int, set[int]]
) -> tuple[Item, ...]:
    members = inside.get(scope, [])
    layers = _layers([node.place for node in members], after)
    found = []
    for node in sorted(members, key=lambda node: (layers[node.place], node.place)):
        parts = _items(node.place, inside, known, after) if node.kind != "task" else ()
        tasks = [task for part in parts for task in part.tasks()]
        counts = counted(tasks) if tasks else {}
        began = [at for at in (node.started_at, *(task.started_at for task in tasks)) if at is not None]
        here = tuple(sorted(after.get(node.place, ())))
        state = _state(node, counts)
        found.append(Item(node, state, parts, here, layers[node.place], min(began, default=None), counts))
    return tuple(found)


def _layers(places: list[int], after: dict[int, set[int]]) -> dict[int, int]:
    """Give each place the length of the longest way to it. What was edited by hand into a circle ends at its entry."""
    here = set(places)
    left = {place: len(after.get(place, set()) & here) for place in places}
    later: dict[int, list[int]] = {}
    for place in places:
        for source in after.get(place, set()) & here:
            later.setdefault(source, []).append(place)
    layers: dict[int, int] = {}
    ready = [place for place in places if not left[place]]
    at = 0
    while len(layers) < len(places):
        following = []
        for place in ready or [place for place in places if place not in layers]:
            layers[place] = at
            for target in later.get(place, ()):
                left[target] -= 1
                if not left[target] and target not in layers:
                    following.append(target)
        ready = following
        at += 1
    return layers


def _state(node: NodeRecord, counts: dict[str, int]) -> str:
    if node.state is not NodeState.RELEASED:
        return node.state.value
    if node.kind == "task":
        return NodeState.RELEASED.value if node.job_state is None else node.job_state.value
    if set(counts) <= {NodeState.WAITING.value}:
        return NodeState.WAITING.value
    goes_on = {"running", "claimed", "pending"} & counts.keys()
    return NodeState.PAUSED.value if NodeState.PAUSED.value in counts and not goes_on else "running"


def counted(items: Iterable[Item]) -> dict[str, int]:
    """Count states, in the order in which they are told."""
    tally = Tally(item.state for item in items)
    known = [state for state in ORDER if state in tally]
    return {state: tally[state] for state in [*known, *(state for state in tally if state not in ORDER)]}


def root_failures(workflow: WorkflowRecord) -> list[NodeRecord]:
    """Give those that failed and may not fail, the first first: they are why others did not begin."""
    nodes = {node.place: node for node in workflow.nodes}
    found = [node for node in workflow.nodes if _is_root_failure(node, nodes)]
    return sorted(found, key=lambda node: (node.finished_at or 0.0, node.place))


def _is_root_failure(node: NodeRecord, nodes: dict[int, NodeRecord]) -> bool:
    if node.state not in (NodeState.FAILED, NodeState.PAUSED):
        return False
    # A scope fails with what is in it; only a map that could not begin has itself to blame.
    if node.kind != "task" and (node.kind == "group" or (node.error or {}).get("node") != node.name):
        return False
    at: NodeRecord | None = node
    while at is not None:
        if at.on_error == "continue":
            return False
        at = nodes.get(at.parent) if at.parent else None
    return True


def paused_nodes(workflow: WorkflowRecord) -> list[NodeRecord]:
    """Give the nodes that wait for an operator."""
    return [node for node in workflow.nodes if node.state is NodeState.PAUSED]


def active_nodes(workflow: WorkflowRecord) -> list[NodeRecord]:
    """Give the nodes whose jobs are with a worker, or on their way to one."""
    going = HELD_STATES | {JobState.PENDING, JobState.WAITING}
    return [node for node in workflow.nodes if node.state is NodeState.RELEASED and node.job_state in going]
