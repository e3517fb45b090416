"""Read the nodes of workflows, and what each of them came to."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import apsw
import msgspec

from unstuck.domain import inputs
from unstuck.domain.inputs import ITEM, NodeError, Part
from unstuck.domain.workflow import NodeState
from unstuck.store.sqlite.verbs import SQL, fetch


class Node(msgspec.Struct, frozen=True):
    place: int
    parent: int | None
    name: str
    kind: str
    state: str
    on_error: str
    blockers: int
    open: int
    source: int | None
    job_id: int | None
    error: str | None

    @property
    def ended_well(self) -> bool:
        """Those who depend on it may go on."""
        return self.state == NodeState.SUCCEEDED or (
            self.on_error == "continue" and self.state in (NodeState.FAILED, NodeState.CANCELLED)
        )


def find_node(cursor: apsw.Cursor, workflow_id: int, place: int) -> Node:
    [row] = fetch(cursor, "node", (workflow_id, place))
    return Node(*row)


def find_nodes(cursor: apsw.Cursor, workflow_id: int, places: Sequence[int]) -> list[Node]:
    """Give these nodes in the order of their places."""
    return [Node(*row) for row in fetch(cursor, "nodes_at", (workflow_id, msgspec.json.encode(places).decode()))]


def nodes_inside(cursor: apsw.Cursor, workflow_id: int, scope: int) -> list[Node]:
    return [Node(*row) for row in fetch(cursor, "nodes_inside", (workflow_id, scope))]


def end_node(cursor: apsw.Cursor, workflow_id: int, place: int, state: NodeState, error: NodeError | None) -> None:
    text = None if error is None else msgspec.json.encode(error).decode()
    cursor.execute(SQL["end_node"], (workflow_id, place, state.value, time.time(), text))


def error_of(node: Node) -> NodeError:
    """Say what a node that did not succeed is to those who depend on it."""
    return (
        result_missing(node.name, node.job_id)
        if node.error is None
        else msgspec.json.decode(node.error, type=NodeError)
    )


def result_missing(name: str, job_id: int | None) -> NodeError:
    """Return the error that stands for a result which is not stored."""
    return NodeError(code="RESULT_NOT_AVAILABLE", message="Its result is not there any more", node=name, job_id=job_id)


def standing_for(cursor: apsw.Cursor, workflow_id: int, place: int) -> Node:
    """Give the node whose result this one's is: a group's is that of the node that stands for it."""
    node = find_node(cursor, workflow_id, place)
    while node.kind == "group" and node.state == NodeState.SUCCEEDED and node.source is not None:
        node = find_node(cursor, workflow_id, node.source)
    return node


def result_text(cursor: apsw.Cursor, workflow_id: int, place: int) -> str:
    """Give the result of a node as JSON; errors stand for themselves, under a name that no result has by chance."""
    node = standing_for(cursor, workflow_id, place)
    if node.state == NodeState.SUCCEEDED and node.kind == "group":
        return "null"
    if node.state == NodeState.SUCCEEDED and node.kind == "map":
        members = nodes_inside(cursor, workflow_id, node.place)
        return f"[{','.join(result_text(cursor, workflow_id, member.place) for member in members)}]"
    part = _part(cursor, node, place)
    if part.error is not None:
        return msgspec.json.encode({inputs.ERROR_KEY: part.error}).decode()
    try:
        return "null" if part.result is None else part.result.decode()
    except UnicodeDecodeError:
        error = NodeError(
            code="RESULT_NOT_AVAILABLE", message="Its result is no JSON", node=node.name, job_id=node.job_id
        )
        return msgspec.json.encode({inputs.ERROR_KEY: error}).decode()


def inputs_of(cursor: apsw.Cursor, job_ids: Sequence[int]) -> dict[int, bytes]:
    """Give for jobs that are nodes how those ended that they need, packed; those that need nothing are left out."""
    ids = msgspec.json.encode(job_ids).decode()
    wanting = [job_id for (job_id,) in fetch(cursor, "jobs_that_need_others", (ids,))]
    return {job_id: inputs.pack(_parts(cursor, job_id)) for job_id in wanting}


def _parts(cursor: apsw.Cursor, job_id: int) -> Iterator[Part]:
    """Read part by part, only as far as is asked for: a result may be large."""
    [(workflow_id, own_place)] = fetch(cursor, "job_place", (job_id,))
    item, value, item_of = cursor.execute(SQL["item_of"], (workflow_id, own_place)).fetchone() or (None, None, None)
    if item is not None:
        if item_of is None:
            yield Part(ITEM, False, item, value)
        else:
            yield _part(cursor, standing_for(cursor, workflow_id, item_of), ITEM)
    for (place,) in fetch(cursor, "inputs_of", (workflow_id, own_place)):
        node = standing_for(cursor, workflow_id, place)
        if node.kind == "map" and node.state == NodeState.SUCCEEDED:
            members = nodes_inside(cursor, workflow_id, node.place)
            yield from (_part(cursor, member, place, n) for n, member in enumerate(members))
            if not members:
                yield Part(place, True, None)
        else:
            yield _part(cursor, node, place)


def _part(cursor: apsw.Cursor, node: Node, place: int, item: int | None = None) -> Part:
    is_list = item is not None
    if node.state != NodeState.SUCCEEDED:
        return Part(place, is_list, item, error=error_of(node))
    if node.kind != "task":
        return Part(place, is_list, item)
    found: Any = cursor.execute(SQL["result_of_job"], (node.job_id,)).fetchone()
    if found is None or found[0] is None:
        return Part(place, is_list, item, error=result_missing(node.name, node.job_id))
    return Part(place, is_list, item, found[0])
