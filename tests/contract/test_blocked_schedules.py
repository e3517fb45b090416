"""More schedules than are looked at in one go wait for locks of an open transaction: all the others fire."""

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from tests.support.builders import QUEUE, TASK, birth, new_job

from unstuck.config import Settings
from unstuck.domain.schedules import ScheduleDefinition, Timing
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.jobs import JobFilter
from unstuck.ledger.contract.schedules import pack_job
from unstuck.ledger.postgres.ledger import PostgresLedger
from unstuck.ledger.postgres.schedules import DUE_AT_ONCE
from unstuck.maintenance.scheduler import Scheduler

BLOCKED = DUE_AT_ONCE + 10
LAPS = 4
"""Few enough that the blocked schedules cannot all have been tried again in between."""


@pytest.fixture
def pg_ledger(swept_pg_url: str) -> Iterator[PostgresLedger]:
    ledger = PostgresLedger(Settings(url=swept_pg_url))
    ledger.workers.register(birth("w1"))
    yield ledger
    ledger.close()


def hourly(name: str, **job: Any) -> ScheduleDefinition:
    return ScheduleDefinition(name, TASK, QUEUE, Timing(every_s=3600.0), pack_job(new_job(**job)), catch_up="latest")


def fired(ledger: Ledger) -> dict[str, int]:
    """Count the jobs by the schedule that enqueued them."""
    counts: dict[str, int] = {}
    for job in ledger.jobs.list(JobFilter(limit=1000)):
        name = (job.enqueued_by or "").split()[1]
        counts[name] = counts.get(name, 0) + 1
    return counts


def test_free_schedules_fire_beside_more_blocked_ones_than_are_looked_at_in_one_go(
    pg_ledger: PostgresLedger, swept_pg_url: str
) -> None:
    keys = [f"key-{number:03}" for number in range(BLOCKED)]
    names = [f"blocked-{number:03}" for number in range(BLOCKED)]
    blocked = [hourly(name, unique_key=key) for name, key in zip(names, keys, strict=True)]
    pg_ledger.schedules.know([*blocked, hourly("free")], "operator")
    keeper = Scheduler(pg_ledger, frozenset())
    with psycopg.connect(swept_pg_url) as user, psycopg.connect(swept_pg_url, autocommit=True) as clock:
        # All are due, and those that are blocked come first.
        clock.execute("update unstuck.schedules set next_at = now() - interval '4 seconds'")
        clock.execute("update unstuck.schedules set next_at = now() - interval '2 seconds' where name = 'free'")
        pg_ledger.jobs.enqueue_on(user, [new_job(unique_key=key) for key in keys])
        laps = 0
        while fired(pg_ledger) == {} and laps < LAPS:
            keeper.step()
            laps += 1
        assert fired(pg_ledger) == {"free": 1}
        user.rollback()
        for _ in range(200):
            if keeper.step() > 60.0 or len(fired(pg_ledger)) > BLOCKED:
                break
    assert fired(pg_ledger) == dict.fromkeys([*names, "free"], 1), "each tick once, after the lock is free"


def test_schedules_that_were_blocked_are_looked_at_after_all_others(ledger: Ledger) -> None:
    ledger.schedules.know([hourly(name) for name in ("a", "b", "c", "d")], "operator")
    due = ledger.schedules.due([], after=["c", "a"]).due
    assert [record.name for record in due] == ["b", "d", "c", "a"]
