"""Schedules in the ledger: exactly one enqueue per tick, whoever fires and however often."""

import threading
from typing import Any

import pytest
from tests.contract.conftest import OpenLedger
from tests.contract.hands import new_job

from unstuck.domain.catching_up import NEVER
from unstuck.domain.schedules import ScheduleDefinition
from unstuck.domain.ticking import Timing
from unstuck.store.contract import Ledger
from unstuck.store.records import Firing, JobFilter, ScheduleRecord, pack_job, unpack_job


def definition(name: str = "nightly", **changes: Any) -> ScheduleDefinition:
    job = changes.pop("job", new_job(priority=3))
    facts: dict[str, Any] = {"task": job.task, "queue": job.queue, "timing": Timing(every_s=1.0), "job": pack_job(job)}
    return ScheduleDefinition(name=name, **{**facts, **changes})


def only(ledger: Ledger) -> ScheduleRecord:
    [record] = ledger.schedules()
    return record


def fire(ledger: Ledger, record: ScheduleRecord, tick: float, count: int = 1) -> list[int] | None:
    jobs = (unpack_job(record.job),) * count
    return ledger.fire_schedule(Firing(record.name, record.version, tick + 1, tick, jobs))


def test_a_definition_is_written_once_and_given_back_as_it_was(ledger: Ledger) -> None:
    one = definition(timing=Timing(cron="*/5 * * * *", zone="Europe/Berlin"), catch_up="all")
    assert ledger.know_schedules([one], "app") == ["nightly"]
    assert ledger.know_schedules([one], "app") == []
    found = only(ledger)
    assert (found.timing, found.catch_up, found.fingerprint) == (one.timing, "all", one.fingerprint)
    assert unpack_job(found.job) == new_job(priority=3)
    assert (found.next_at, found.last_at, found.last_job_id, found.version, found.paused) == (
        None,
        None,
        None,
        1,
        False,
    )


def test_only_who_knows_it_exactly_so_finds_it_due(ledger: Ledger) -> None:
    one = definition()
    ledger.know_schedules([one], "app")
    assert [record.name for record in ledger.due_schedules([one.fingerprint]).due] == ["nightly"]
    assert ledger.due_schedules([]).due == ()
    assert ledger.due_schedules([definition(catch_up="all").fingerprint]).due == ()


def test_what_an_operator_made_is_for_every_worker(ledger: Ledger) -> None:
    ledger.know_schedules([definition()], "operator")
    assert [record.name for record in ledger.due_schedules([]).due] == ["nightly"]


def test_a_tick_is_enqueued_with_the_schedule_moved_on(ledger: Ledger) -> None:
    one = definition()
    ledger.know_schedules([one], "app")
    now = ledger.due_schedules([one.fingerprint]).now
    ids = fire(ledger, only(ledger), now, count=2)
    assert ids is not None
    assert [job.id for job in ledger.jobs(JobFilter())] == sorted(ids, reverse=True)
    found = only(ledger)
    assert found.last_at == pytest.approx(now, abs=1e-5)
    assert found.next_at == pytest.approx(now + 1, abs=1e-5)
    assert (found.last_job_id, found.version) == (ids[-1], 2)
    assert found.fired_at == pytest.approx(now, abs=30)
    record = ledger.job(ids[0])
    assert record is not None
    assert (record.task, record.priority) == ("add", 3)


def test_who_read_it_before_it_moved_on_fires_nothing(ledger: Ledger) -> None:
    ledger.know_schedules([definition()], "app")
    early = only(ledger)
    assert fire(ledger, early, 1000.0)
    assert fire(ledger, early, 1000.0) is None
    assert len(ledger.jobs(JobFilter())) == 1


def test_of_many_at_once_one_fires(open_again: OpenLedger, ledger: Ledger) -> None:
    ledger.know_schedules([definition()], "app")
    ledgers = [open_again() for _ in range(4)]
    answers: list[list[int] | None] = []
    for round_number in range(5):
        record = only(ledger)
        barrier = threading.Barrier(len(ledgers))

        def race(mine: Ledger, barrier: threading.Barrier = barrier, record: ScheduleRecord = record) -> None:
            barrier.wait()
            answers.append(fire(mine, record, 1000.0))

        threads = [threading.Thread(target=race, args=(mine,)) for mine in ledgers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(answer is not None for answer in answers) == round_number + 1
    assert len(ledger.jobs(JobFilter())) == 5


def test_a_paused_schedule_is_neither_found_nor_fired_and_begins_anew(ledger: Ledger) -> None:
    one = definition()
    ledger.know_schedules([one], "app")
    fire(ledger, only(ledger), 1000.0)
    before = only(ledger)
    assert ledger.pause_schedule("nightly", True, "me")
    assert not ledger.pause_schedule("nightly", True, "me")
    assert ledger.due_schedules([one.fingerprint]).due == ()
    assert fire(ledger, before, 1001.0) is None
    assert fire(ledger, only(ledger), 1001.0) is None
    assert (only(ledger).paused, only(ledger).paused_by) == (True, "me")
    assert ledger.pause_schedule("nightly", False, "me")
    found = only(ledger)
    assert (found.paused, found.paused_by, found.next_at, found.last_at) == (False, None, None, 1000.0)
    assert [event.kind for event in ledger.events()] == ["schedule_paused", "schedule_resumed"]


def test_a_changed_definition_takes_the_place_of_the_old_one(ledger: Ledger) -> None:
    ledger.know_schedules([definition()], "app")
    fire(ledger, only(ledger), 1000.0)
    # The same times: it goes on where it is, and no tick is lost or doubled by a deploy.
    assert ledger.know_schedules([definition(job=new_job(priority=9))], "app") == ["nightly"]
    found = only(ledger)
    assert (found.next_at, found.version, unpack_job(found.job).priority) == (1001.0, 3, 9)
    # Other times: it begins anew.
    ledger.know_schedules([definition(timing=Timing(every_s=60.0))], "app")
    assert (only(ledger).next_at, only(ledger).last_at) == (None, 1000.0)


def test_whoever_fires_the_old_definition_comes_too_late(ledger: Ledger) -> None:
    ledger.know_schedules([definition()], "app")
    old = only(ledger)
    ledger.know_schedules([definition(catch_up="all")], "app")
    assert fire(ledger, old, 1000.0) is None
    assert ledger.jobs(JobFilter()) == []


def test_it_says_when_the_next_one_is_due(ledger: Ledger) -> None:
    one, other = definition(), definition("other")
    ledger.know_schedules([one, other], "app")
    now = ledger.due_schedules([one.fingerprint]).now
    for record, in_s in zip(ledger.schedules(), (500.0, 100.0), strict=True):
        ledger.fire_schedule(Firing(record.name, record.version, now + in_s, None))
    assert ledger.due_schedules([one.fingerprint, other.fingerprint]).next_in_s == pytest.approx(100, abs=30)
    found = ledger.due_schedules([one.fingerprint])
    assert found.due == ()
    assert found.next_in_s == pytest.approx(500, abs=30)


def test_one_that_ticked_far_ahead_of_the_clock_is_found(ledger: Ledger) -> None:
    one = definition()
    ledger.know_schedules([one], "app")
    now = ledger.due_schedules([one.fingerprint]).now
    fire(ledger, only(ledger), now + 86400)
    assert [record.name for record in ledger.due_schedules([one.fingerprint]).due] == ["nightly"]


def test_one_that_never_ticks_again_can_be_kept(ledger: Ledger) -> None:
    one = definition()
    ledger.know_schedules([one], "app")
    ledger.fire_schedule(Firing("nightly", 1, NEVER, None))
    assert only(ledger).next_at == NEVER
    assert ledger.due_schedules([one.fingerprint]).due == ()


def test_an_unfinished_job_of_the_same_key_stands_for_the_tick(ledger: Ledger) -> None:
    ledger.know_schedules([definition(job=new_job(unique_key="k"))], "app")
    first = fire(ledger, only(ledger), 1000.0)
    assert fire(ledger, only(ledger), 1001.0) == first
    assert only(ledger).last_job_id == (first or [0])[0]


def test_a_tick_can_bring_news(ledger: Ledger) -> None:
    ledger.know_schedules([definition()], "app")
    ledger.fire_schedule(Firing("nightly", 1, 5.0, None, (), "schedule_missed", "three of them"))
    assert [(event.kind, event.message) for event in ledger.events()] == [("schedule_missed", "three of them")]


def test_a_removed_schedule_is_gone(ledger: Ledger) -> None:
    ledger.know_schedules([definition()], "app")
    early = only(ledger)
    assert ledger.remove_schedule("nightly", "me")
    assert not ledger.remove_schedule("nightly", "me")
    assert ledger.schedules() == []
    assert fire(ledger, early, 1000.0) is None
    assert [event.kind for event in ledger.events()] == ["schedule_removed"]
