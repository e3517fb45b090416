"""Cancel what was not begun in time."""

import time
from collections.abc import Collection

import apsw

from unstuck.domain.states import AttemptState
from unstuck.store.sqlite.ties import Ended, settled
from unstuck.store.sqlite.verbs import SQL, write_event


def expire(cursor: apsw.Cursor, job_ids: Collection[int]) -> set[str]:
    """Cancel those of these that are still pending and too old; give the queues in which others became ready by it."""
    tied: list[Ended] = []
    now = time.time()
    for job_id in job_ids:
        found = cursor.execute(SQL["expire_job"], (job_id, now)).fetchall()
        if found:
            write_event(cursor, "expired", f"EXPIRED: {found[0][1]}", job_id=job_id)
            if found[0][0]:
                tied.append((job_id, AttemptState.CANCELLED))
    return settled(cursor, tied)
