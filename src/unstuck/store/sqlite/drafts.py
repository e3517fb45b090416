"""Keep what the jobs of nodes will be, and enqueue them when their time has come.

A draft has no unique key and no time of its own: so its job is one row, written from another.
"""

import time
from collections.abc import Iterable, Sequence

import apsw
import msgspec

from unstuck.store.records import NewJob, Ties
from unstuck.store.sqlite.client import hooks_text
from unstuck.store.sqlite.errors import refuse_nul
from unstuck.store.sqlite.lines import line_up
from unstuck.store.sqlite.verbs import SQL, fetch


def keep_drafts(cursor: apsw.Cursor, workflow_id: int, drafts: Iterable[tuple[int, NewJob, bool]]) -> None:
    """Write them by place; each with whether it is given results of others."""
    cursor.executemany(SQL["insert_draft"], [(workflow_id, *_row(*draft)) for draft in drafts])


def enqueue_drafts(cursor: apsw.Cursor, workflow_id: int, places: Sequence[int], of_map: int | None = None) -> set[str]:
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
    more = job.more or Ties()
    refuse_nul(job.task, job.queue, job.enqueued_by, job.payload_type, more.line)
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
        more.line,
        more.line_limit,
        True if needs else None,
        hooks_text(more),
        more.expires_in_s,
        more.keep_s,
        job.policy or None,
        job.payload,
    )
