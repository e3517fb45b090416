"""Heartbeats of remote workers, many in one commit, on SQLite."""

import apsw
import msgspec

from unstuck.domain.states import LIVE_STATES, WorkerState
from unstuck.ledger.contract.workers import HeartbeatAnswer, RemoteHeartbeat
from unstuck.ledger.sqlite.clock import Clock
from unstuck.ledger.sqlite.database import SQL, fetch, write_event


def beat_one(cursor: apsw.Cursor, heartbeat: RemoteHeartbeat, clock: Clock) -> HeartbeatAnswer:
    """Beat for one of them, inside a write."""
    worker_id = heartbeat.worker_id
    found = cursor.execute(SQL["foreign_pulse"], (worker_id,)).fetchone()
    if found is None:
        return HeartbeatAnswer(WorkerState.DEAD)
    state, draining, request, boot_id, disabled = found
    if state not in LIVE_STATES:
        return HeartbeatAnswer(WorkerState(state))
    if boot_id != clock.boot_id:
        cursor.execute(SQL["move_to_this_boot"], (worker_id, clock.boot_id))
        cursor.execute(SQL["restart_deadlines"], (worker_id, clock.boot_s, clock.at))
    cursor.execute(SQL["beat_foreign"], (worker_id, clock.at, heartbeat.running, heartbeat.settled))
    was_suspect = state == WorkerState.SUSPECT
    if was_suspect:
        cursor.execute(SQL["clear_suspicion"], (worker_id,))
        state = WorkerState.DRAINING if draining else WorkerState.ACTIVE
        write_event(cursor, "worker_recovered", "It beat again: it was only slow.", worker_id=worker_id)
    if heartbeat.metadata is not None:
        cursor.execute(SQL["set_metadata"], (worker_id, msgspec.json.encode(heartbeat.metadata).decode()))
    cancel = tuple(fetch(cursor, "cancel_asked", (worker_id,)))
    return HeartbeatAnswer(WorkerState(state), was_suspect, request, cancel, bool(disabled))
