"""Queue a finished job again, with fresh counters; its last attempt becomes history."""

import time

import apsw

from unstuck.domain.states import FINAL, JobState
from unstuck.store.sqlite.keys import PERIOD
from unstuck.store.sqlite.lines import admit
from unstuck.store.sqlite.verbs import SQL, write_event


def queue_again(cursor: apsw.Cursor, job_id: int, by: str) -> str:
    """Say what became of it: `queued`, or why not."""
    found = cursor.execute(SQL["job_brief"], (job_id,)).fetchone()
    if found is None:
        return "missing"
    state, worker_id, token, unique_key, ended_as, code, cause, finished_at, _, line = found[:10]
    if state == JobState.SUCCEEDED:
        return "succeeded"
    if state not in FINAL:
        return "live"
    lives = unique_key is not None and found[11] != PERIOD
    if lives and cursor.execute(SQL["find_live_key"], (unique_key,)).get is not None:
        return "duplicate"
    if token is not None:
        cursor.execute(SQL["archive_attempt"], (job_id, token, ended_as or state, finished_at, code, cause))
    cursor.execute(SQL["retry_job"], (job_id, time.time()))
    write_event(cursor, "retried", f"Queued again by {by} (it was {state})", job_id=job_id, worker_id=worker_id)
    if line is not None:
        admit(cursor, {line})
    return "queued"
