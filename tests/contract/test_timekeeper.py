"""Whoever keeps the clock: what it makes up for, and what one broken schedule costs the others."""

from typing import Any

import pytest
from tests.contract.hands import new_job

from unstuck.domain.payload import decode_call
from unstuck.domain.schedules import ScheduleDefinition
from unstuck.domain.ticking import Timing
from unstuck.reaper.timekeeper import LOOK_EVERY_S, Timekeeper
from unstuck.store.contract import Ledger
from unstuck.store.records import Firing, JobFilter, pack_job


def plan(ledger: Ledger, name: str, late_s: float, job: bytes | None = None, **changes: Any) -> None:
    """Write a schedule of an operator that has been due for so long."""
    packed = pack_job(new_job()) if job is None else job
    timing = changes.pop("timing", Timing(every_s=3600.0))
    ledger.know_schedules([ScheduleDefinition(name, "add", "default", timing, packed, **changes)], "operator")
    now = ledger.due_schedules([]).now
    version = next(record.version for record in ledger.schedules() if record.name == name)
    assert ledger.fire_schedule(Firing(name, version, (now - late_s) // 3600 * 3600, None)) == []


@pytest.mark.parametrize(("catch_up", "count"), [("skip", 0), ("latest", 1), ("all", 3)])
def test_what_was_missed_is_made_up_for_by_the_rule(ledger: Ledger, catch_up: Any, count: int) -> None:
    # Between the hours, so that no tick is on time.
    now = ledger.due_schedules([]).now
    timing = Timing(cron=f"{int(now // 60 + 30) % 60} * * * *")
    plan(ledger, "hourly", 0.0, timing=timing, catch_up=catch_up)
    [record] = ledger.schedules()
    first = now - 2.5 * 3600
    ledger.fire_schedule(Firing("hourly", record.version, first // 60 * 60, None))
    keeper = Timekeeper(ledger, frozenset())
    assert keeper.step() == 0.0
    jobs = ledger.jobs(JobFilter())
    assert len(jobs) == count
    assert keeper.step() > 0.0, "each tick once"
    assert len(ledger.jobs(JobFilter())) == count
    told = [event.message for event in ledger.events() if event.kind == "schedule_missed"]
    assert len(told) == (catch_up != "all")
    for job in jobs:
        whole = ledger.job(job.id)
        assert whole is not None
        assert (decode_call(whole.payload).scheduled_for or 0.0) < now
        assert (whole.enqueued_by or "").startswith("schedule hourly for ")


def test_a_schedule_that_cannot_be_read_does_not_stop_the_others(ledger: Ledger) -> None:
    plan(ledger, "a-broken", 10.0, job=b"not a job at all")
    plan(ledger, "b-zone", 10.0, timing=Timing(cron="* * * * *", zone="Moon/Base"))
    plan(ledger, "c-good", 10.0)
    keeper = Timekeeper(ledger, frozenset())
    assert 0.0 < keeper.step() < LOOK_EVERY_S, "it neither gives up nor turns at full speed"
    assert [job.enqueued_by for job in ledger.jobs(JobFilter()) if "c-good" in (job.enqueued_by or "")]


def test_where_nothing_is_planned_it_sleeps_long(ledger: Ledger) -> None:
    assert Timekeeper(ledger, frozenset()).step() == LOOK_EVERY_S
