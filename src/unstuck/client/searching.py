"""Look through many jobs for few, bit by bit, and stop after a while: what matches may be rare, or not there at all."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from unstuck.store.records import JobFilter, JobRecord

PATIENCE_S = 1.0
FIRST_SPAN = 20_000
"""Numbers of jobs that are looked through at once, to begin with."""
STEP_S = 0.1
"""How long one step should take; a span is made wider or narrower for it."""
MOST_WIDENED = 8.0
LEAST_SPAN = 1_000

List = Callable[[JobFilter], list[JobRecord]]


@dataclass(frozen=True)
class Found:
    jobs: list[JobRecord]
    """Newest first."""
    before_id: int | None
    """Where to go on: there may be more. None: that was all."""


def search(
    list_jobs: List, where: JobFilter, patience_s: float = PATIENCE_S, clock: Callable[[], float] = time.monotonic
) -> Found:
    """Give the newest that match, at most `where.limit`; fewer where the time is up before all were looked at."""
    before_id = where.before_id or _after_newest(list_jobs)
    until_s = clock() + patience_s
    jobs: list[JobRecord] = []
    span = FIRST_SPAN
    while before_id > 1:
        began_s = clock()
        from_id = max(1, before_id - span)
        # One more than wanted says whether there are more.
        missing = where.limit - len(jobs) + 1
        jobs += list_jobs(msgspec.structs.replace(where, before_id=before_id, from_id=from_id, limit=missing))
        if len(jobs) > where.limit:
            return Found(jobs[: where.limit], jobs[where.limit - 1].id)
        before_id = from_id
        now_s = clock()
        if now_s >= until_s:
            break
        span = max(LEAST_SPAN, int(span * min(MOST_WIDENED, STEP_S / max(now_s - began_s, 1e-6))))
    return Found(jobs, before_id if before_id > 1 else None)


def _after_newest(list_jobs: List) -> int:
    newest = list_jobs(JobFilter(limit=1))
    return newest[0].id + 1 if newest else 1
