"""List jobs by the shortest way: each state has an index in which it is rare, but for the one that most jobs are in."""

import heapq
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from unstuck.domain.states import HELD, WRONG, JobState
from unstuck.store.records import JobFilter, JobRecord
from unstuck.store.sqlite.database import Database
from unstuck.store.sqlite.rows import job_record
from unstuck.store.sqlite.verbs import SQL, fetch

NO_ID = 2**63 - 1
MANY = 5_000
"""From so many pending jobs on, the newest jobs are read one by one: among them are pending ones soon enough."""


def list_jobs(db: Database, where: JobFilter) -> list[JobRecord]:
    with db.read() as cursor:
        lists = [fetch(cursor, *way) for way in _ways(cursor, where)]
    newest = heapq.merge(*lists, key=lambda row: row[0], reverse=True)
    oldest = where.from_id or 0
    first = (row for row, _ in zip(newest, range(where.limit), strict=False) if row[0] >= oldest)
    return [job_record(row, is_whole=False) for row in first]


def _ways(cursor: Any, where: JobFilter) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Give queries with their values that find all of it together, and nothing twice."""
    states = frozenset(where.states)
    if where.error is not None:
        yield "jobs_with_error", (*_values(where, states), where.error)
        return
    if not states or JobState.SUCCEEDED in states:
        yield "jobs", (*_values(where, states), where.from_id or 0)
        return
    if held := states & HELD:
        yield "jobs_held", _values(where, held)
    if JobState.PENDING in states:
        pending = _values(where, frozenset({JobState.PENDING}))
        if cursor.execute(SQL["many_pending"], (MANY,)).get:
            yield "jobs", (*pending, where.from_id or 0)
        else:
            yield "jobs_ready", pending
            yield "jobs_waiting", pending
            yield "jobs_blocked", pending
    if JobState.WAITING in states:
        suspended = _values(where, frozenset({JobState.WAITING}))
        yield "jobs_waiting", suspended
        yield "jobs_awaiting", suspended
    if wrong := states & WRONG:
        for (code,) in fetch(cursor, "error_codes"):
            yield "jobs_with_error", (*_values(where, wrong), code)


def _values(where: JobFilter, states: frozenset[JobState]) -> tuple[Any, ...]:
    now = time.time()
    return (
        NO_ID if where.before_id is None else where.before_id,
        msgspec.json.encode(sorted(states)).decode(),
        where.queue,
        where.task,
        where.worker_id,
        None if where.older_than_s is None else now - where.older_than_s,
        None if where.newer_than_s is None else now - where.newer_than_s,
        where.limit,
    )
