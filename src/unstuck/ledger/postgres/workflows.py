"""Workflows on PostgreSQL: store, show, retry, resume, repair."""

from collections.abc import Collection, Sequence
from itertools import groupby
from typing import Any

import msgspec
import psycopg

from unstuck.domain import node_inputs
from unstuck.domain.node_inputs import NodeError, Part
from unstuck.domain.states import JobState
from unstuck.domain.workflows import NodeState, WorkflowState
from unstuck.errors import LedgerBusy
from unstuck.ledger.checks import LARGEST_ID, check_workflow
from unstuck.ledger.contract.jobs import Enqueued, NewJob, OnceAnswer, Request
from unstuck.ledger.contract.workflows import NewWorkflow, NodeRecord, WorkflowRecord
from unstuck.ledger.postgres import arrays, errors
from unstuck.ledger.postgres.connection import Row
from unstuck.ledger.postgres.database import Database
from unstuck.ledger.postgres.enqueue import (
    JobIds,
    driver_connection,
    part_of,
    refuse_other_words,
    repeat_uncertain,
)
from unstuck.ledger.postgres.locks import past_locks, write_past_locks

KEY_ROUNDS = 100


class Workflows:
    """See `unstuck.ledger.contract.workflows.Workflows`."""

    def __init__(self, db: Database, job_ids: JobIds) -> None:
        self._db = db
        self._job_ids = job_ids

    def begin(self, workflow: NewWorkflow) -> Enqueued:
        check_workflow(workflow)
        with self._db.client_connection.hold():
            [workflow_id] = self._job_ids.take(1)
        values = {"id": workflow_id, "name": workflow.name, **_values(workflow)}
        while True:
            queues = self._begin("begin_workflow", values)[0][0]
            if queues is not None:
                self._db.notify(f"queue:{queue}" for queue in queues)
                return Enqueued(workflow_id)
            if self._db.client_connection.ask(self._db.sql["workflow"], {"id": workflow_id}):
                return Enqueued(workflow_id)
            found = self._db.client_connection.ask(self._db.sql["owner_of_key"], {"key": workflow.root.unique_key})
            if found:
                return Enqueued(found[0][0], fresh=False)

    def begin_on(self, connection: Any, workflow: NewWorkflow) -> Enqueued:
        theirs = driver_connection(connection)
        check_workflow(workflow)
        values = _values(workflow)
        refuse_other_words(theirs, (workflow.name, *values.values()))
        return past_locks(self._db, self._db.client_connection, lambda: self._begin_on(theirs, workflow, values))

    def begin_once(self, request: Request, workflow: NewWorkflow) -> OnceAnswer:
        check_workflow(workflow)
        with self._db.client_connection.hold():
            [workflow_id] = self._job_ids.take(1)
        values = {
            "id": workflow_id,
            "name": workflow.name,
            "unique_key": workflow.root.unique_key,
            "key": request.key,
            "fingerprint": request.fingerprint,
            "keep_s": request.keep_s,
            **_values(workflow),
        }
        first, fingerprint, job_ids, fresh, queues = self._begin("begin_workflow_once", values)[0]
        if fingerprint != request.fingerprint:
            return OnceAnswer((), repeated=True)
        self._db.notify(f"queue:{queue}" for queue in queues or ())
        # Where our own id is there it was us, in a try whose answer was lost.
        return OnceAnswer((Enqueued(job_ids[0], fresh[0]),), repeated=not first and job_ids != [workflow_id])

    def get(self, workflow_id: int) -> WorkflowRecord | None:
        rows = self._db.read("workflow", id=workflow_id)
        if not rows:
            return None
        nodes = tuple(_node(row) for row in self._db.read("workflow_nodes", id=workflow_id))
        return WorkflowRecord(*_head(rows[0]), nodes)

    def place_of(self, job_id: int) -> tuple[int, int] | None:
        rows = self._db.read("job_place", id=job_id)
        return (rows[0][0], rows[0][1]) if rows and rows[0][0] is not None else None

    def inputs(self, job_ids: Sequence[int]) -> dict[int, bytes]:
        return (
            _packed(self._db.read("inputs", ids=arrays.int8s(list(job_ids)), max_bytes=node_inputs.MAX_BYTES))
            if job_ids
            else {}
        )

    def retry(self, workflow_id: int, by: str) -> bool:
        taken_up = self._act("retry_workflow", id=workflow_id, by=by)
        if taken_up:
            cancel_withdrawn(self._db, [workflow_id])
        return taken_up

    def resume(self, workflow_id: int, by: str) -> bool:
        return self._act("resume_workflow", id=workflow_id, by=by)

    def _begin_on(self, theirs: psycopg.Connection[Any], workflow: NewWorkflow, values: dict[str, str]) -> Enqueued:
        with part_of(self._db, theirs, 1) as (ask, [workflow_id]):
            for _ in range(KEY_ROUNDS):
                begun = ask(self._db.sql["begin_workflow_later"], {"id": workflow_id, "name": workflow.name, **values})
                if begun[0][0] is not None:
                    return Enqueued(workflow_id)
                found = ask(self._db.sql["owner_of_key"], {"key": workflow.root.unique_key})
                if found:
                    return Enqueued(found[0][0], fresh=False)
            raise LedgerBusy(
                f"The unique key {workflow.root.unique_key!r} is held by a workflow that your transaction cannot see. "
                "Nothing was written. Try again in a new transaction."
            )

    def _begin(self, query: str, values: dict[str, Any]) -> list[Row]:
        return past_locks(
            self._db,
            self._db.client_connection,
            lambda: repeat_uncertain(lambda: self._db.client_connection.write(self._db.sql[query], values)),
        )

    def _act(self, query: str, **values: Any) -> bool:
        rows = write_past_locks(self._db, query, **values)
        if not rows or rows[0][0] is None:
            return False
        self._db.notify(f"queue:{queue}" for queue in rows[0][0])
        return True

    def list(self, state: str | None = None, before_id: int | None = None, limit: int = 100) -> list[WorkflowRecord]:
        page = {"before_id": LARGEST_ID if before_id is None else before_id, "limit": limit}
        rows = (
            self._db.read("workflows", **page)
            if state is None
            else self._db.read("workflows_in_state", state=state, **page)
        )
        return [WorkflowRecord(*_head(row), counts=row[5] or {}) for row in rows]


def cancel_withdrawn(db: Database, job_ids: Collection[int]) -> None:
    """Those of the workflows that these jobs, which were queued again, are of."""
    for (job_id,) in db.read("nodes_to_unstop", ids=arrays.int8s(list(job_ids))) if job_ids else ():
        # Each alone: who waits for one while holding another might wait for ever.
        write_past_locks(db, "unstop", id=job_id)


def inputs_of(db: Database, job_ids: list[int]) -> dict[int, bytes]:
    """Return how the nodes ended that each of these jobs depends on, packed for a new attempt."""
    if not job_ids:
        return {}
    rows = db.turn_connection.ask(db.sql["inputs"], {"ids": arrays.int8s(job_ids), "max_bytes": node_inputs.MAX_BYTES})
    return _packed(rows)


def _packed(rows: list[Row]) -> dict[int, bytes]:
    return {job_id: _packed_one(list(found)) for job_id, found in groupby(rows, key=lambda row: row[0])}


def _packed_one(rows: list[Row]) -> bytes:
    parts = [_part(row) for row in rows]
    if any(part.error is not None and part.error.code == node_inputs.TOO_LARGE for part in parts):
        return node_inputs.refused()
    return node_inputs.pack_inputs(parts)


def _part(row: Row) -> Part:
    _, place, is_list, item, result, error = row
    return Part(place, is_list, item, result, None if error is None else msgspec.convert(error, NodeError))


def _head(row: Row) -> tuple[int, str, WorkflowState, float, float | None]:
    return row[0], row[1], WorkflowState(row[2]), row[3], row[4]


def _node(row: Row) -> NodeRecord:
    place, parent, name, kind, state, on_error, job_id, job_state, *rest, after = row
    known = None if job_state is None else JobState(job_state)
    own = (place, parent, name, kind, NodeState(state), on_error, job_id, known)
    return NodeRecord(*(*own, *rest, tuple(after)))


def _values(workflow: NewWorkflow) -> dict[str, str]:
    blockers, members = workflow.blockers(), workflow.members()
    given = {edge.target for edge in workflow.edges if edge.data}
    nodes = [
        {
            "place": node.place,
            "parent": node.parent,
            "name": node.name,
            "kind": node.kind,
            "on_error": node.on_error,
            "blockers": blockers.get(node.place, 0),
            "open": members.get(node.place, 0),
            "source": node.source,
            "needs_inputs": True if node.kind == "map" or node.place in given else None,
            "spec": None if node.job is None else _spec(node.job),
        }
        for node in workflow.nodes
    ]
    edges = [(edge.source, edge.target, edge.data) for edge in workflow.edges]
    try:
        return {
            "root": msgspec.json.encode(_spec(workflow.root)).decode(),
            "nodes": msgspec.json.encode(nodes).decode(),
            "edges": msgspec.json.encode(edges).decode(),
        }
    except UnicodeEncodeError as error:
        raise errors.unwritable_text(error) from None


def _spec(job: NewJob) -> dict[str, Any]:
    """Say what a job will be, as the functions of the schema read it; what is as usual is left out."""
    facts = {
        "queue": job.queue,
        "task": job.task,
        "payload": job.payload,
        "payload_type": None if job.payload_type == "json" else job.payload_type,
        "policy": job.policy or None,
        "on_crash": None if job.on_crash == "fail" else job.on_crash,
        "heartbeat": None if job.heartbeat else False,
        "heartbeat_timeout_s": job.heartbeat_timeout_s,
        "timeout_s": job.timeout_s,
        "rank": -job.priority or None,
        "delay_s": job.delay_s or None,
        "unique_key": job.unique_key,
        "enqueued_by": job.enqueued_by,
        "more": job.more,
    }
    return {name: value for name, value in facts.items() if value is not None}
