"""Keep workflows: begin them, show them, take them up again, and repair what should be impossible."""

import time
from collections.abc import Sequence
from typing import Any

import apsw
import msgspec

from unstuck.domain.states import JobState
from unstuck.domain.workflows import NodeState, WorkflowState
from unstuck.errors import DuplicateJob
from unstuck.ledger.checks import LARGEST_ID, check_workflow
from unstuck.ledger.contract.jobs import Enqueued, OnceAnswer, Request
from unstuck.ledger.contract.workflows import NewWorkflow, NodeRecord, WorkflowRecord
from unstuck.ledger.sqlite.advance import (
    Node,
    begin,
    find_node,
    inputs_of,
    keep_node_jobs,
    nodes_inside,
    recount,
    resolve,
)
from unstuck.ledger.sqlite.database import SQL, Database, fetch, write_event
from unstuck.ledger.sqlite.endings import requeue
from unstuck.ledger.sqlite.enqueue import insert_jobs, once, part_of
from unstuck.ledger.sqlite.errors import refuse_nul
from unstuck.ledger.sqlite.notifier import Notifier

SLOWEST_NODE_S = 0.002
_ENDED_BADLY = (WorkflowState.FAILED, WorkflowState.CANCELLED, WorkflowState.PAUSED)


class Workflows:
    """See `unstuck.ledger.contract.workflows.Workflows`."""

    def __init__(self, db: Database, wakeups: Notifier) -> None:
        self._db = db
        self._wakeups = wakeups

    def begin(self, workflow: NewWorkflow) -> Enqueued:
        check_workflow(workflow)
        refuse_nul(workflow.name, *(node.name for node in workflow.nodes))
        woken: set[str] = set()
        with self._db.write(limit_s=len(workflow.nodes) * SLOWEST_NODE_S) as cursor:
            stored = _begin(cursor, workflow, woken)
        self._wakeups.notify_queues(woken)
        return stored

    def begin_on(self, connection: Any, workflow: NewWorkflow) -> Enqueued:
        with part_of(self._db, connection) as cursor:
            check_workflow(workflow)
            refuse_nul(workflow.name, *(node.name for node in workflow.nodes))
            return _begin(cursor, workflow, set())

    def begin_once(self, request: Request, workflow: NewWorkflow) -> OnceAnswer:
        check_workflow(workflow)
        refuse_nul(workflow.name, *(node.name for node in workflow.nodes))
        woken: set[str] = set()
        with self._db.write(limit_s=len(workflow.nodes) * SLOWEST_NODE_S) as cursor:
            answer = once(cursor, request, lambda: [_begin(cursor, workflow, woken)])
        self._wakeups.notify_queues(woken)
        return answer

    def get(self, workflow_id: int) -> WorkflowRecord | None:
        with self._db.read() as cursor:
            found = cursor.execute(SQL["workflow"], (workflow_id,)).fetchone()
            if found is None:
                return None
            after: dict[int, list[int]] = {}
            for target, source in fetch(cursor, "workflow_edges", (workflow_id,)):
                after.setdefault(target, []).append(source)
            rows = fetch(cursor, "workflow_nodes", (workflow_id,))
        return WorkflowRecord(*_head(found), tuple(_node(row, after.get(row[0], [])) for row in rows))

    def place_of(self, job_id: int) -> tuple[int, int] | None:
        with self._db.read() as cursor:
            found = cursor.execute(SQL["job_place"], (job_id,)).fetchone()
        return None if found is None or found[0] is None else (found[0], found[1])

    def inputs(self, job_ids: Sequence[int]) -> dict[int, bytes]:
        with self._db.read() as cursor:
            return inputs_of(cursor, [job_id for job_id in job_ids if _is_node(cursor, job_id)])

    def retry(self, workflow_id: int, by: str) -> bool:
        refuse_nul(by)
        with self._db.write() as cursor:
            woken = reopen_workflow(cursor, workflow_id, by)
        self._wakeups.notify_queues(woken or ())
        return woken is not None

    def resume(self, workflow_id: int, by: str) -> bool:
        refuse_nul(by)
        with self._db.write() as cursor:
            if _state(cursor, workflow_id) != WorkflowState.PAUSED:
                return False
            places = [place for (place,) in fetch(cursor, "paused_nodes", (workflow_id,))]
            for place in places:
                cursor.execute(SQL["go_past_node"], (workflow_id, place))
            cursor.execute(SQL["go_on_workflow"], (workflow_id,))
            write_event(cursor, "workflow_resumed", f"Resumed by {by}, past what failed", job_id=workflow_id)
            woken = resolve(cursor, workflow_id, places)
        self._wakeups.notify_queues(woken)
        return True

    def list(self, state: str | None = None, before_id: int | None = None, limit: int = 100) -> list[WorkflowRecord]:
        page = (LARGEST_ID if before_id is None else before_id, limit)
        with self._db.read() as cursor:
            if state is None:
                rows = fetch(cursor, "workflows", page)
            else:
                rows = fetch(cursor, "workflows_in_state", (*page, state))
            return [WorkflowRecord(*_head(row), counts=dict(fetch(cursor, "count_nodes", (row[0],)))) for row in rows]


def may_reopen(cursor: apsw.Cursor, job_id: int) -> bool:
    """Say whether nobody else has the unique key of the workflow that would go on with this job."""
    found = cursor.execute(SQL["job_place"], (job_id,)).fetchone()
    if found is None or found[0] is None:
        return True
    ended = _state(cursor, found[0]) in (WorkflowState.FAILED, WorkflowState.CANCELLED)
    return not ended or cursor.execute(SQL["owner_of_roots_key"], (found[0],)).get is None


def reopen(cursor: apsw.Cursor, job_id: int, by: str) -> None:
    """A job was queued again by an operator: its node waits for it again, and so does a workflow that ended with it.
    Its own job, queued again, means the whole workflow."""
    [(workflow_id, place)] = fetch(cursor, "job_place", (job_id,))
    if workflow_id is None or _state(cursor, workflow_id) is None:
        return
    if place == 0:
        reopen_workflow(cursor, workflow_id, by)
        return
    node = find_node(cursor, workflow_id, place)
    if node.job_id != job_id or node.on_error == "continue" or not _is_over(node):
        return
    cursor.execute(SQL["reopen_node"], (workflow_id, place, NodeState.RELEASED.value, job_id))
    if _state(cursor, workflow_id) in (WorkflowState.FAILED, WorkflowState.CANCELLED):
        reopen_workflow(cursor, workflow_id, by)
    elif not fetch(cursor, "paused_nodes", (workflow_id,)):
        cursor.execute(SQL["go_on_workflow"], (workflow_id,))


def reopen_workflow(cursor: apsw.Cursor, workflow_id: int, by: str) -> set[str] | None:
    """Open a workflow that ended badly, or is paused: what failed is tried again, what was not begun may begin."""
    if _state(cursor, workflow_id) not in _ENDED_BADLY:
        return None
    owner = cursor.execute(SQL["owner_of_roots_key"], (workflow_id,)).get
    if owner is not None:
        # While it was over another was started with its unique key.
        raise DuplicateJob(owner)
    cursor.execute(SQL["go_on_workflow"], (workflow_id,))
    cursor.execute(SQL["reopen_root"], (workflow_id,))
    cursor.execute(SQL["reopen_node"], (workflow_id, 0, NodeState.RELEASED.value, None))
    _reopen_scope(cursor, workflow_id, 0, by)
    cursor.execute(SQL["unstop_nodes"], (workflow_id,))
    write_event(cursor, "retried", f"Workflow was taken up again by {by}", job_id=workflow_id)
    return recount(cursor, workflow_id)


def _reopen_scope(cursor: apsw.Cursor, workflow_id: int, scope: int, by: str) -> None:
    """What is inside a scope that failed and may have failed is left as it is. What runs still, though its scope was
    closed, ends as it will."""
    for node in nodes_inside(cursor, workflow_id, scope):
        if node.kind != "task" and node.state == NodeState.RELEASED:
            _reopen_scope(cursor, workflow_id, node.place, by)
        again = node.state in (NodeState.CANCELLED, NodeState.PAUSED) or (
            node.state == NodeState.FAILED and node.on_error != "continue"
        )
        if not again:
            continue
        if node.kind != "task":
            opened = node.kind == "group" or bool(nodes_inside(cursor, workflow_id, node.place))
            state = NodeState.RELEASED if opened else NodeState.WAITING
            cursor.execute(SQL["reopen_node"], (workflow_id, node.place, state.value, None))
            if opened:
                _reopen_scope(cursor, workflow_id, node.place, by)
            continue
        retried = node.job_id is not None and requeue(cursor, node.job_id, by) == "queued"
        state, job_id = (NodeState.RELEASED, node.job_id) if retried else (NodeState.WAITING, None)
        cursor.execute(SQL["reopen_node"], (workflow_id, node.place, state.value, job_id))


def _is_over(node: Node) -> bool:
    return node.state in (NodeState.FAILED, NodeState.CANCELLED, NodeState.PAUSED)


def _is_node(cursor: apsw.Cursor, job_id: int) -> bool:
    found = cursor.execute(SQL["job_place"], (job_id,)).fetchone()
    return found is not None and found[0] is not None


def _state(cursor: apsw.Cursor, workflow_id: int) -> WorkflowState | None:
    found = cursor.execute(SQL["workflow"], (workflow_id,)).fetchone()
    return None if found is None else WorkflowState(found[2])


def _begin(cursor: apsw.Cursor, workflow: NewWorkflow, woken: set[str]) -> Enqueued:
    [stored] = insert_jobs(cursor, [workflow.root])
    if stored.fresh:
        _insert(cursor, stored.job_id, workflow)
        woken |= begin(cursor, stored.job_id)
    return stored


def _insert(cursor: apsw.Cursor, workflow_id: int, workflow: NewWorkflow) -> None:
    blockers, members = workflow.blockers(), workflow.members()
    cursor.execute(SQL["insert_workflow"], (workflow_id, workflow.name, time.time()))
    cursor.execute(SQL["stand_for_workflow"], (workflow_id,))
    given = {edge.target for edge in workflow.edges if edge.data}
    rows, drafts = [], []
    for node in workflow.nodes:
        state = NodeState.RELEASED if node.kind == "group" else NodeState.WAITING
        if node.job is not None:
            drafts.append((node.place, node.job, node.kind == "map" or node.place in given))
        counts = (blockers.get(node.place, 0), members.get(node.place, 0))
        rows.append(
            (
                workflow_id,
                node.place,
                node.parent,
                node.name,
                node.kind,
                state.value,
                node.on_error,
                *counts,
                node.source,
            )
        )
    cursor.executemany(SQL["insert_node"], rows)
    keep_node_jobs(cursor, workflow_id, drafts)
    cursor.executemany(
        SQL["insert_edge"], [(workflow_id, edge.source, edge.target, edge.data) for edge in workflow.edges]
    )


def _head(row: tuple[Any, ...]) -> tuple[int, str, WorkflowState, float, float | None]:
    return row[0], row[1], WorkflowState(row[2]), row[3], row[4]


def _node(row: tuple[Any, ...], after: list[int]) -> NodeRecord:
    place, parent, name, kind, state, on_error, job_id, job_state, task, started_at, finished_at, error, *rest = row
    known = None if job_state is None else JobState(job_state)
    facts = None if error is None else msgspec.json.decode(error)
    own = (place, parent, name, kind, NodeState(state), on_error, job_id, known, task, started_at, finished_at, facts)
    return NodeRecord(*(*own, *rest, tuple(after)))
