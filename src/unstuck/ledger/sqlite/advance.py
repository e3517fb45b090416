"""Advance a workflow when one of its nodes ends, on SQLite."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import apsw
import msgspec

from unstuck.domain import node_inputs
from unstuck.domain.endings import JobError, missing_error
from unstuck.domain.node_inputs import ITEM, NodeError, Part
from unstuck.domain.states import AttemptState, JobState
from unstuck.domain.workflows import MAX_ITEMS, NodeState, WorkflowState
from unstuck.errors import ErrorCode
from unstuck.ledger.contract.jobs import JobExtras, NewJob
from unstuck.ledger.sqlite.concurrency import leave_lines, line_up
from unstuck.ledger.sqlite.database import SQL, fetch, write_event
from unstuck.ledger.sqlite.enqueue import hooks_text
from unstuck.ledger.sqlite.errors import refuse_nul
from unstuck.ledger.sqlite.hooks import fire_hooks


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
        return msgspec.json.encode({node_inputs.ERROR_KEY: part.error}).decode()
    try:
        return "null" if part.result is None else part.result.decode()
    except UnicodeDecodeError:
        error = NodeError(
            code="RESULT_NOT_AVAILABLE", message="Its result is no JSON", node=node.name, job_id=node.job_id
        )
        return msgspec.json.encode({node_inputs.ERROR_KEY: error}).decode()


def inputs_of(cursor: apsw.Cursor, job_ids: Sequence[int]) -> dict[int, bytes]:
    """Give for jobs that are nodes how those ended that they need, packed; those that need nothing are left out."""
    ids = msgspec.json.encode(job_ids).decode()
    wanting = [job_id for (job_id,) in fetch(cursor, "jobs_that_need_others", (ids,))]
    return {job_id: node_inputs.pack_inputs(_parts(cursor, job_id)) for job_id in wanting}


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


def keep_node_jobs(cursor: apsw.Cursor, workflow_id: int, drafts: Iterable[tuple[int, NewJob, bool]]) -> None:
    """Write them by place; each with whether it is given results of others."""
    cursor.executemany(SQL["insert_draft"], [(workflow_id, *_row(*draft)) for draft in drafts])


def enqueue_node_jobs(
    cursor: apsw.Cursor, workflow_id: int, places: Sequence[int], of_map: int | None = None
) -> set[str]:
    """Enqueue the jobs of these nodes in this order, all from the one draft of their map if they are its members; give
    the queues in which they are."""
    count = len(places)
    first = cursor.execute(SQL["reserve_job_ids"], (count,)).get - count + 1
    text = msgspec.json.encode(list(places)).decode()
    now = time.time()
    cursor.execute(SQL["enqueue_drafts"], (workflow_id, text, of_map, first, now))
    rows = [(workflow_id, place, job_id) for job_id, place in enumerate(places, first)]
    cursor.executemany(SQL["release_node"], rows)
    queues: set[str] = set()
    lines: dict[str, int | None] = {}
    for queue, line, limit in fetch(
        cursor, "where_drafts_go", (workflow_id, text if of_map is None else f"[{of_map}]")
    ):
        queues.add(queue)
        if line is not None:
            lines[line] = limit or lines.get(line)
    if lines:
        line_up(cursor, lines)
    cursor.executemany(SQL["know_queue"], [(queue,) for queue in sorted(queues)])
    return queues


def _row(place: int, job: NewJob, needs: bool) -> tuple[object, ...]:
    assert job.unique_key is None, "a node has none"
    assert job.run_at is None, "a node has none"
    more = job.more or JobExtras()
    refuse_nul(job.task, job.queue, job.enqueued_by, job.payload_type, more.concurrency_key)
    return (
        place,
        -job.priority,
        job.queue,
        job.task,
        max(job.delay_s, 0.0),
        "retry" if job.on_crash == "retry" else None,
        job.heartbeat,
        job.heartbeat_timeout_s,
        job.timeout_s,
        job.enqueued_by,
        None if job.payload_type == "json" else job.payload_type,
        more.concurrency_key,
        more.concurrency_limit,
        True if needs else None,
        hooks_text(more),
        more.expires_in_s,
        more.retain_s,
        job.policy or None,
        job.payload,
    )


MAX_RESULT_BYTES = 64 * 1024 * 1024
_NODE_STATES = {JobState.SUCCEEDED: NodeState.SUCCEEDED, JobState.CANCELLED: NodeState.CANCELLED}
_list_decoder = msgspec.json.Decoder(list[msgspec.Raw])

Due = tuple[int, str]
"""A node whose time has come: its place and kind."""


def advance(cursor: apsw.Cursor, ended: Sequence[tuple[int, AttemptState]]) -> set[str]:
    """Attempts at these jobs ended. Where a job is over, so is its node; where the job of a workflow itself was
    cancelled, nothing of it is begun any more."""
    ids = msgspec.json.encode([job_id for job_id, _ in ended]).decode()
    woken: set[str] = set()
    # The whole before its parts: who gave up both gave up the workflow, it did not fail.
    for (workflow_id,) in fetch(cursor, "cancelled_roots", (ids,)):
        woken |= _cancel(cursor, workflow_id)
    over: dict[int, list[Node]] = {}
    rows: list[tuple[Any, ...]] = []
    for row in fetch(cursor, "concerned_nodes", (ids,)):
        workflow_id, place, parent, name, on_error, job_state, job_id, code, message, cause, at, no_result = row
        error, state = None, _NODE_STATES.get(job_state, NodeState.FAILED).value
        if job_state != JobState.SUCCEEDED:
            stored = None if not code else JobError(code, message or "", cause)
            error = _encoded(node_error(name, job_id, stored or missing_error(JobState(job_state), has_result=True)))
        elif no_result:
            # A success always stores one, if only `null`: this one was edited by hand, or restored in part.
            error, state = _encoded(result_missing(name, job_id)), NodeState.FAILED.value
        rows.append((workflow_id, place, state, at, error))
        node = Node(place, parent, name, "task", state, on_error, 0, 0, None, job_id, error)
        over.setdefault(workflow_id, []).append(node)
    cursor.executemany(SQL["end_node"], rows)
    return woken | move_on(cursor, over)


def node_error(name: str, job_id: int, error: JobError | None) -> NodeError:
    """Return what a job that did not succeed is to those who depend on it."""
    if error is None:
        return result_missing(name, job_id)
    code = "TASK_CANCELLED" if error.code == ErrorCode.CANCELLED else error.code
    return NodeError(code=code, message=error.message, cause=error.cause, node=name, job_id=job_id)


def _encoded(error: NodeError) -> str:
    return msgspec.json.encode(error).decode()


def move_on(cursor: apsw.Cursor, ended: Mapping[int, list[Node]]) -> set[str]:
    """Go on after these nodes ended, by workflow and in the order of their places, round by round; give the queues in
    which jobs became ready."""
    woken: set[str] = set()
    while ended:
        following: dict[int, list[Node]] = {}
        for workflow_id, nodes in ended.items():
            queues, over = _one_round(cursor, workflow_id, nodes)
            woken |= queues
            if over:
                following[workflow_id] = find_nodes(cursor, workflow_id, over)
        ended = following
    return woken


def _one_round(cursor: apsw.Cursor, workflow_id: int, nodes: list[Node]) -> tuple[set[str], list[int]]:
    """Do what follows at once from the ends of these nodes; give the queues, and the scopes and maps that ended."""
    woken: set[str] = set()
    over: list[int] = []
    # Of several that ended at once those that failed come first: what they close is not begun by the others.
    for node in nodes:
        if node.parent is None:
            # The outermost scope is over: so is its workflow.
            woken |= _finish(cursor, workflow_id, node)
        elif not node.ended_well and _is_open(cursor, workflow_id, node.parent):
            if node.on_error == "pause":
                _pause(cursor, workflow_id, node)
            else:
                woken |= _fail_scope(cursor, workflow_id, node)
                over.append(node.parent)
    scopes = Counter(node.parent for node in nodes if node.parent is not None and node.ended_well)
    # What happens in a scope that is closed changes nothing any more.
    still_open = {scope for scope in scopes if _is_open(cursor, workflow_id, scope)}
    good = [node.place for node in nodes if node.parent in still_open and node.ended_well]
    if not good:
        return woken, over
    due = _unblock(cursor, workflow_id, good)
    over += [scope for scope in sorted(still_open) if _leave_scope(cursor, workflow_id, scope, scopes[scope])]
    queues, ended = release_nodes(cursor, workflow_id, due)
    return woken | queues, over + ended


def _is_open(cursor: apsw.Cursor, workflow_id: int, scope: int) -> bool:
    return find_node(cursor, workflow_id, scope).state == NodeState.RELEASED


def release_nodes(cursor: apsw.Cursor, workflow_id: int, due: Iterable[Due]) -> tuple[set[str], list[int]]:
    """Enqueue the jobs of nodes whose time has come, and open maps whose list is known.

    Gives the queues, and the maps that ended at once: of an empty list, or without one."""
    in_order = sorted(due)
    tasks = [place for place, kind in in_order if kind == "task"]
    maps = [place for place, kind in in_order if kind != "task"]
    woken = enqueue_node_jobs(cursor, workflow_id, tasks) if tasks else set()
    over: list[int] = []
    for node in find_nodes(cursor, workflow_id, maps) if maps else ():
        if (members := _open_map(cursor, workflow_id, node)) is None:
            over.append(node.place)
        else:
            woken |= enqueue_node_jobs(cursor, workflow_id, members, of_map=node.place)
    return woken, over


def _open_map(cursor: apsw.Cursor, workflow_id: int, node: Node) -> range | None:
    """Make the members of a map; give their places, or None where it ended at once."""
    assert node.source is not None
    values, members, trouble = _items(cursor, workflow_id, node.source)
    count = len(values) + len(members)
    if trouble is None and count > MAX_ITEMS:
        trouble = _too_many(count)
    if trouble is not None:
        error = NodeError(code="RESULT_NOT_AVAILABLE", message="The map could not begin", cause=trouble, node=node.name)
        end_node(cursor, workflow_id, node.place, NodeState.FAILED, error)
        return None
    if count == 0:
        end_node(cursor, workflow_id, node.place, NodeState.SUCCEEDED, None)
        return None
    first = cursor.execute(SQL["last_place"], (workflow_id,)).get + 1
    cursor.execute(SQL["open_map"], (workflow_id, node.place, count))
    rows, edges = [], []
    for n in range(count):
        value, member = (values[n], None) if values else (None, members[n])
        name = f"{node.name}[{n}]"
        rows.append((workflow_id, first + n, node.place, name, node.on_error, n, value, member))
        edges.append((workflow_id, node.place, first + n, node.source))
    cursor.executemany(SQL["insert_member"], rows)
    cursor.executemany(SQL["copy_edges"], edges)
    return range(first, first + count)


def _items(cursor: apsw.Cursor, workflow_id: int, source: int) -> tuple[list[bytes], list[int], str | None]:
    """Give the items of a list by value, or the places of those whose results they are, or why there are none."""
    node = standing_for(cursor, workflow_id, source)
    if node.state != NodeState.SUCCEEDED:
        return [], [], "there is no result to map over: the node before it did not succeed"
    if node.kind == "map":
        return [], [member.place for member in nodes_inside(cursor, workflow_id, node.place)], None
    found = None if node.kind != "task" else cursor.execute(SQL["result_of_job"], (node.job_id,)).fetchone()
    if found is None or found[0] is None:
        return [], [], "the result that it maps over is not there any more"
    try:
        count = _count_items(cursor, found[0])
        if count > MAX_ITEMS:
            return [], [], _too_many(count)
        return [bytes(item) for item in _list_decoder.decode(found[0])], [], None
    except msgspec.MsgspecError:
        return [], [], "the result that it maps over is no list"


def _too_many(count: int) -> str:
    return f"a map has at most {MAX_ITEMS} items, and the list has {count}"


def _count_items(cursor: apsw.Cursor, result: bytes) -> int:
    """Return how many items a list in JSON has, without building any of them: exactly if they may be too many, else at
    most."""
    commas = result.count(b",")
    if commas < MAX_ITEMS:
        return commas + 1
    try:
        return int(cursor.execute("SELECT json_array_length(?)", (result.decode(),)).get)
    except (apsw.SQLError, UnicodeDecodeError):
        # Nested deeper than SQLite reads, or no JSON at all.
        return 0


def _unblock(cursor: apsw.Cursor, workflow_id: int, ended: list[int]) -> list[Due]:
    """Tell those who wait for these; give whose time has come."""
    due: list[Due] = []
    rows: list[tuple[int, int, int]] = []
    for place, blockers, state, kind in fetch(cursor, "freed_by", (workflow_id, msgspec.json.encode(ended).decode())):
        is_due = blockers == 0 and state == NodeState.WAITING
        if is_due:
            due.append((place, kind))
        if not (is_due and kind == "task"):
            # Whose job is enqueued in a moment is written then.
            rows.append((workflow_id, place, blockers))
    cursor.executemany(SQL["wait_for_fewer"], rows)
    return due


def _leave_scope(cursor: apsw.Cursor, workflow_id: int, scope: int, count: int) -> bool:
    """So many in a scope have ended; True where they were the last ones."""
    [(left, state)] = fetch(cursor, "leave_scope", (workflow_id, scope, count))
    if left or state != NodeState.RELEASED:
        return False
    end_node(cursor, workflow_id, scope, NodeState.SUCCEEDED, None)
    return True


def _pause(cursor: apsw.Cursor, workflow_id: int, node: Node) -> None:
    error = error_of(node)
    end_node(cursor, workflow_id, node.place, NodeState.PAUSED, error)
    cursor.execute(SQL["pause_workflow"], (workflow_id,))
    why = error.cause or error.message
    sentence = f"Node {node.name} failed ({error.code}) and waits for an operator: {why}"
    write_event(cursor, "workflow_paused", sentence[:500], job_id=workflow_id)


def _fail_scope(cursor: apsw.Cursor, workflow_id: int, node: Node) -> set[str]:
    assert node.parent is not None
    end_node(cursor, workflow_id, node.parent, NodeState.FAILED, error_of(node))
    woken = _close(cursor, workflow_id, node.parent, f"node {node.name} failed before it")
    # What waited for an operator may have been in there.
    cursor.execute(SQL["go_on_if_nothing_is_paused"], (workflow_id,))
    return woken


def _close(cursor: apsw.Cursor, workflow_id: int, scope: int, cause: str) -> set[str]:
    """Cancel what is in a scope and was not begun. What runs goes on, and its end changes nothing any more.

    What was claimed and not begun is taken back: its worker finds out when it would start it."""
    woken: set[str] = set()
    for node in nodes_inside(cursor, workflow_id, scope):
        if node.kind != "task":
            woken |= _close(cursor, workflow_id, node.place, cause)
        begun = node.state not in (NodeState.WAITING, NodeState.PAUSED) and node.kind == "task"
        if node.state == NodeState.RELEASED and node.job_id is not None:
            cursor.execute(SQL["stop_job_of_workflow"], (node.job_id, time.time(), cause))
            if cursor.connection.changes():
                begun = False
                write_event(cursor, "cancelled", f"CANCELLED: {cause}"[:500], job_id=node.job_id)
                woken |= leave_lines(cursor, [(node.job_id, AttemptState.CANCELLED)])
        if not begun and node.state in (NodeState.WAITING, NodeState.PAUSED, NodeState.RELEASED):
            error = NodeError(
                code="TASK_CANCELLED", message="It was not begun", cause=cause, node=node.name, job_id=node.job_id
            )
            end_node(cursor, workflow_id, node.place, NodeState.CANCELLED, error)
    return woken


def _cancel(cursor: apsw.Cursor, workflow_id: int) -> set[str]:
    woken = _close(cursor, workflow_id, 0, f"workflow {workflow_id} was cancelled")
    cursor.execute(SQL["ask_nodes_to_stop"], (workflow_id,))
    root = find_node(cursor, workflow_id, 0)
    error = NodeError(code="TASK_CANCELLED", message="Workflow was cancelled", node=root.name)
    end_node(cursor, workflow_id, 0, NodeState.CANCELLED, error)
    cursor.execute(SQL["end_workflow"], (workflow_id, WorkflowState.CANCELLED.value, time.time()))
    return woken


def _finish(cursor: apsw.Cursor, workflow_id: int, root: Node) -> set[str]:
    """Write the end of a whole workflow: of its row, and of the job that stands for it."""
    error = None if root.state == NodeState.SUCCEEDED else error_of(root)
    result = None
    if error is None:
        result = result_text(cursor, workflow_id, 0).encode()
        if len(result) > MAX_RESULT_BYTES:
            cause = f"the results of the workflow together are over {MAX_RESULT_BYTES} bytes"
            error = NodeError(code=ErrorCode.RESULT_NOT_STORABLE, message="Result cannot be stored", cause=cause)
            result = None
    state = JobState.SUCCEEDED if error is None else JobState.FAILED
    now = time.time()
    cursor.execute(SQL["end_workflow"], (workflow_id, state.value, now))
    facts: tuple[str | None, ...] = (None, None, None, None)
    if error is not None:
        details = msgspec.json.encode({"node": error.node, "node_job_id": error.job_id}).decode()
        facts = (error.code, error.message, error.cause, details)
        sentence = f"{error.code}: node {error.node}: {error.cause or error.message}"
        write_event(cursor, "failed", sentence[:500], job_id=workflow_id)
    hooks = cursor.execute(SQL["end_root"], (workflow_id, state.value, now, result, *facts)).fetchall()
    if not hooks or hooks[0][0] is None:
        return set()
    return fire_hooks(cursor, [(workflow_id, AttemptState(state.value))])


def begin(cursor: apsw.Cursor, workflow_id: int) -> set[str]:
    """Release what waits for nobody."""
    woken, over = release_nodes(cursor, workflow_id, fetch(cursor, "nodes_due", (workflow_id,)))
    return woken | resolve(cursor, workflow_id, over)


def recount(cursor: apsw.Cursor, workflow_id: int) -> set[str]:
    """Count anew what each node and scope waits for, from what is known of its nodes, and go on from there."""
    cursor.execute(SQL["recount_nodes"], (workflow_id,))
    woken = begin(cursor, workflow_id)
    over = [place for (place,) in fetch(cursor, "scopes_over", (workflow_id,))]
    for place in over:
        end_node(cursor, workflow_id, place, NodeState.SUCCEEDED, None)
    return woken | resolve(cursor, workflow_id, over)


def resolve(cursor: apsw.Cursor, workflow_id: int, places: Sequence[int]) -> set[str]:
    return move_on(cursor, {workflow_id: find_nodes(cursor, workflow_id, places)} if places else {})
