"""Whoever keeps the clock: what it makes up for, and what one broken schedule costs the others."""

from typing import Any

import pytest
from tests.contract.hands import birth, new_job

from unstuck.domain.payload import decode_call
from unstuck.domain.schedules import ScheduleDefinition
from unstuck.domain.ticking import Timing
from unstuck.reaper.restoring import Restorer
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


# A definition that only a short-lived worker had ------------------------------------------------


def defined(every_s: float) -> ScheduleDefinition:
    return ScheduleDefinition("nightly", "add", "default", Timing(every_s=every_s), pack_job(new_job()))


def join(ledger: Ledger, worker_id: str, *definitions: ScheduleDefinition) -> None:
    """Start a worker whose code has these schedules, as `unstuck worker` does."""
    ledger.register(birth(worker_id, metadata={"schedules": [one.fingerprint for one in definitions]}))
    ledger.know_schedules(definitions, "app")


def in_force(ledger: Ledger) -> float | None:
    [record] = ledger.schedules()
    return record.timing.every_s


def test_a_living_worker_restores_the_schedule_that_a_canary_changed(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = defined(60.0), defined(61.0)
    join(ledger, "w1", old)
    Timekeeper(ledger, [old]).step()
    restorer = Restorer(ledger, [old])
    join(ledger, "canary", new)
    ledger.pause_schedule("nightly", True, "ops")
    restorer.look()
    assert in_force(ledger) == 61.0, "a worker lives that has it so"
    ledger.retire("canary")
    restorer.look()
    [record] = ledger.schedules()
    assert (record.timing.every_s, record.fingerprint, record.paused) == (60.0, old.fingerprint, True)
    [told] = [event for event in ledger.events() if event.kind == "schedule_restored"]
    assert "nightly" in told.message
    restorer.look()
    assert len([event for event in ledger.events() if event.kind == "schedule_restored"]) == 1
    # The thread of a worker does so by itself.
    join(ledger, "second canary", new)
    ledger.retire("second canary")
    monkeypatch.setattr("unstuck.reaper.restoring.LOOK_EVERY_S", 0.0)
    Timekeeper(ledger, [old]).step()
    assert in_force(ledger) == 60.0


def test_a_schedule_that_was_removed_or_taken_over_by_an_operator_is_not_restored(ledger: Ledger) -> None:
    old = defined(60.0)
    join(ledger, "w1", old)
    restorer = Restorer(ledger, [old])
    ledger.know_schedules([defined(61.0)], "operator")
    restorer.look()
    assert in_force(ledger) == 61.0
    ledger.remove_schedule("nightly", "ops")
    restorer.look()
    assert ledger.schedules() == []
