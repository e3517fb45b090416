"""Let so many jobs of one line be at work at once as may be.

A job has a place in its line from when it is let in (ready) until its attempt ends: that is a fact of its row, so there
is no count that could drift. Only `admit` lets jobs in, under the write lock."""

import time
from collections.abc import Collection, Sequence

import apsw
import msgspec

from unstuck.domain.states import AttemptState
from unstuck.ledger.sqlite.database import SQL, fetch


def admit(cursor: apsw.Cursor, lines: Collection[str]) -> set[str]:
    """Let in who is next in these lines, as far as there are places; give the queues in which jobs became ready."""
    woken: set[str] = set()
    for line in lines:
        places = cursor.execute(SQL["places_of"], (line,)).get
        if places is None:
            places = cursor.execute(SQL["open_line"], (line, time.time())).get
        free = places - cursor.execute(SQL["count_in_line"], (line,)).get
        if free > 0:
            woken |= {queue for (queue,) in fetch(cursor, "let_in", (line, free))}
    return woken


def line_up(cursor: apsw.Cursor, places: dict[str, int | None]) -> None:
    """Jobs were enqueued: what they say of their lines counts from now on, and who may go in goes in."""
    for line, limit in places.items():
        if limit is not None:
            cursor.execute(SQL["set_places"], (line, limit, time.time()))
    admit(cursor, places)


def leave_lines(cursor: apsw.Cursor, ended: Sequence[tuple[int, AttemptState]]) -> set[str]:
    """Attempts at these jobs ended: their places are free. So are those in queues that have a limit."""
    rows = fetch(cursor, "lines_left", (msgspec.json.encode([job_id for job_id, _ in ended]).decode(),))
    limited = {queue for _, queue in rows if queue is not None}
    return limited | admit(cursor, {line for line, _ in rows if line is not None})
