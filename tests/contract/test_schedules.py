"""Jobs for later: they wait, become due, and wake whoever serves them."""

import threading
import time
from typing import Any

import pytest
from tests.contract.conftest import OpenLedger
from tests.support.backdoor import Backdoor
from tests.support.builders import birth, claim_jobs, crash_retry, new_job, put, running, turn, wish
from tests.support.fleet import TIMEOUT_S

from unstuck.config import Recovery
from unstuck.domain.payload import decode_call
from unstuck.domain.schedules import NEVER, ScheduleDefinition, Timing
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.jobs import JobFilter
from unstuck.ledger.contract.schedules import Firing, ScheduleRecord, pack_job, unpack_job
from unstuck.maintenance import scheduler
from unstuck.maintenance.schedule_restore import ScheduleRestorer
from unstuck.maintenance.scheduler import LOOK_EVERY_S, Scheduler
from unstuck.maintenance.service import ScheduleWakeUps, run_daemon


def test_a_delayed_job_waits_and_says_when_it_is_due(ledger: Ledger, w1: str) -> None:
    put(ledger, delay_s=60.0)
    answer = wish(ledger)
    assert answer.claimed == ()
    assert answer.next_due_in_s == pytest.approx(60, abs=5)
    assert ledger.maintenance.promote_due(10).count == 0


def test_run_at_wins_over_a_delay(ledger: Ledger, w1: str) -> None:
    put(ledger, delay_s=1000.0, run_at=time.time() + 60)
    assert wish(ledger).next_due_in_s == pytest.approx(60, abs=5)


def test_a_time_in_the_past_means_now(ledger: Ledger, w1: str) -> None:
    job_id = put(ledger, run_at=time.time() - 1000)
    assert [job.job_id for job in claim_jobs(ledger)] == [job_id]


def test_what_is_due_becomes_ready_and_its_queues_are_named(ledger: Ledger, w1: str, meddler: Backdoor) -> None:
    due = put(ledger, queue="a", delay_s=60.0)
    put(ledger, queue="b", delay_s=600.0)
    meddler.age_job(due, 61)
    promoted = ledger.maintenance.promote_due(10)
    assert (promoted.count, promoted.queues) == (1, {"a"})
    assert promoted.next_due_in_s == pytest.approx(600, abs=5)
    assert [job.job_id for job in claim_jobs(ledger, queues=("a", "b"))] == [due]


def test_promotion_is_bounded_and_goes_on_where_it_stopped(ledger: Ledger, w1: str, meddler: Backdoor) -> None:
    ids = [answer.job_id for answer in ledger.jobs.enqueue([new_job(delay_s=60.0) for _ in range(5)])]
    for job_id in ids:
        meddler.age_job(job_id, 61)
    assert [ledger.maintenance.promote_due(2).count for _ in range(4)] == [2, 2, 1, 0]
    assert len(claim_jobs(ledger)) == 5


def test_a_retry_waits_out_its_backoff_and_then_goes_first(ledger: Ledger, w1: str, meddler: Backdoor) -> None:
    job = running(ledger)
    later = put(ledger)
    turn(ledger, endings=[crash_retry(job, delay_s=60)])
    answer = wish(ledger)
    assert [claimed.job_id for claimed in answer.claimed] == [later]
    assert answer.next_due_in_s == pytest.approx(60, abs=5)
    meddler.age_job(job.job_id, 61)
    assert ledger.maintenance.promote_due(10).count == 1
    assert [claimed.job_id for claimed in claim_jobs(ledger)] == [job.job_id]


def test_the_next_due_time_is_that_of_the_queues_asked_for(ledger: Ledger, w1: str) -> None:
    put(ledger, queue="mine", delay_s=600.0)
    put(ledger, queue="other", delay_s=5.0)
    assert wish(ledger, queues=("mine",)).next_due_in_s == pytest.approx(600, abs=5)
    assert wish(ledger, queues=("none",)).next_due_in_s is None


def test_a_due_job_that_nobody_promoted_yet_is_due_at_once(ledger: Ledger, w1: str, meddler: Backdoor) -> None:
    job_id = put(ledger, delay_s=60.0)
    meddler.age_job(job_id, 100)
    answer = wish(ledger)
    assert answer.claimed or answer.next_due_in_s == 0.0


def test_priority_counts_among_those_that_became_due(ledger: Ledger, w1: str, meddler: Backdoor) -> None:
    low = put(ledger, delay_s=60.0)
    high = put(ledger, delay_s=60.0, priority=5)
    for job_id in (low, high):
        meddler.age_job(job_id, 61)
    ledger.maintenance.promote_due(10)
    assert [job.job_id for job in claim_jobs(ledger)] == [high, low]


def definition(name: str = "nightly", **changes: Any) -> ScheduleDefinition:
    job = changes.pop("job", new_job(priority=3))
    facts: dict[str, Any] = {"task": job.task, "queue": job.queue, "timing": Timing(every_s=1.0), "job": pack_job(job)}
    return ScheduleDefinition(name=name, **{**facts, **changes})


def only(ledger: Ledger) -> ScheduleRecord:
    [record] = ledger.schedules.list()
    return record


def fire(ledger: Ledger, record: ScheduleRecord, tick: float, count: int = 1) -> list[int] | None:
    jobs = (unpack_job(record.job),) * count
    return ledger.schedules.fire(Firing(record.name, record.version, tick + 1, tick, jobs))


def test_a_definition_is_written_once_and_given_back_as_it_was(ledger: Ledger) -> None:
    one = definition(timing=Timing(cron="*/5 * * * *", zone="Europe/Berlin"), catch_up="all")
    assert ledger.schedules.know([one], "app") == ["nightly"]
    assert ledger.schedules.know([one], "app") == []
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
    ledger.schedules.know([one], "app")
    assert [record.name for record in ledger.schedules.due([one.fingerprint]).due] == ["nightly"]
    assert ledger.schedules.due([]).due == ()
    assert ledger.schedules.due([definition(catch_up="all").fingerprint]).due == ()


def test_what_an_operator_made_is_for_every_worker(ledger: Ledger) -> None:
    ledger.schedules.know([definition()], "operator")
    assert [record.name for record in ledger.schedules.due([]).due] == ["nightly"]


def test_a_tick_is_enqueued_with_the_schedule_moved_on(ledger: Ledger) -> None:
    one = definition()
    ledger.schedules.know([one], "app")
    now = ledger.schedules.due([one.fingerprint]).now
    ids = fire(ledger, only(ledger), now, count=2)
    assert ids is not None
    assert [job.id for job in ledger.jobs.list(JobFilter())] == sorted(ids, reverse=True)
    found = only(ledger)
    assert found.last_at == pytest.approx(now, abs=1e-5)
    assert found.next_at == pytest.approx(now + 1, abs=1e-5)
    assert (found.last_job_id, found.version) == (ids[-1], 2)
    assert found.fired_at == pytest.approx(now, abs=30)
    record = ledger.jobs.get(ids[0])
    assert record is not None
    assert (record.task, record.priority) == ("add", 3)


def test_who_read_it_before_it_moved_on_fires_nothing(ledger: Ledger) -> None:
    ledger.schedules.know([definition()], "app")
    early = only(ledger)
    assert fire(ledger, early, 1000.0)
    assert fire(ledger, early, 1000.0) is None
    assert len(ledger.jobs.list(JobFilter())) == 1


def test_of_many_at_once_one_fires(open_again: OpenLedger, ledger: Ledger) -> None:
    ledger.schedules.know([definition()], "app")
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
    assert len(ledger.jobs.list(JobFilter())) == 5


def test_a_paused_schedule_is_neither_found_nor_fired_and_begins_anew(ledger: Ledger) -> None:
    one = definition()
    ledger.schedules.know([one], "app")
    fire(ledger, only(ledger), 1000.0)
    before = only(ledger)
    assert ledger.schedules.pause("nightly", True, "me")
    assert not ledger.schedules.pause("nightly", True, "me")
    assert ledger.schedules.due([one.fingerprint]).due == ()
    assert fire(ledger, before, 1001.0) is None
    assert fire(ledger, only(ledger), 1001.0) is None
    assert (only(ledger).paused, only(ledger).paused_by) == (True, "me")
    assert ledger.schedules.pause("nightly", False, "me")
    found = only(ledger)
    assert (found.paused, found.paused_by, found.next_at, found.last_at) == (False, None, None, 1000.0)
    assert [event.kind for event in ledger.events.list()] == ["schedule_paused", "schedule_resumed"]


def test_a_changed_definition_takes_the_place_of_the_old_one(ledger: Ledger) -> None:
    ledger.schedules.know([definition()], "app")
    fire(ledger, only(ledger), 1000.0)
    # The same times: it goes on where it is, and no tick is lost or doubled by a deploy.
    assert ledger.schedules.know([definition(job=new_job(priority=9))], "app") == ["nightly"]
    found = only(ledger)
    assert (found.next_at, found.version, unpack_job(found.job).priority) == (1001.0, 3, 9)
    # Other times: it begins anew.
    ledger.schedules.know([definition(timing=Timing(every_s=60.0))], "app")
    assert (only(ledger).next_at, only(ledger).last_at) == (None, 1000.0)


def test_whoever_fires_the_old_definition_comes_too_late(ledger: Ledger) -> None:
    ledger.schedules.know([definition()], "app")
    old = only(ledger)
    ledger.schedules.know([definition(catch_up="all")], "app")
    assert fire(ledger, old, 1000.0) is None
    assert ledger.jobs.list(JobFilter()) == []


def test_it_says_when_the_next_one_is_due(ledger: Ledger) -> None:
    one, other = definition(), definition("other")
    ledger.schedules.know([one, other], "app")
    now = ledger.schedules.due([one.fingerprint]).now
    for record, in_s in zip(ledger.schedules.list(), (500.0, 100.0), strict=True):
        ledger.schedules.fire(Firing(record.name, record.version, now + in_s, None))
    assert ledger.schedules.due([one.fingerprint, other.fingerprint]).next_in_s == pytest.approx(100, abs=30)
    found = ledger.schedules.due([one.fingerprint])
    assert found.due == ()
    assert found.next_in_s == pytest.approx(500, abs=30)


def test_one_that_ticked_far_ahead_of_the_clock_is_found(ledger: Ledger) -> None:
    one = definition()
    ledger.schedules.know([one], "app")
    now = ledger.schedules.due([one.fingerprint]).now
    fire(ledger, only(ledger), now + 86400)
    assert [record.name for record in ledger.schedules.due([one.fingerprint]).due] == ["nightly"]


def test_one_that_never_ticks_again_can_be_kept(ledger: Ledger) -> None:
    one = definition()
    ledger.schedules.know([one], "app")
    ledger.schedules.fire(Firing("nightly", 1, NEVER, None))
    assert only(ledger).next_at == NEVER
    assert ledger.schedules.due([one.fingerprint]).due == ()


def test_an_unfinished_job_of_the_same_key_stands_for_the_tick(ledger: Ledger) -> None:
    ledger.schedules.know([definition(job=new_job(unique_key="k"))], "app")
    first = fire(ledger, only(ledger), 1000.0)
    assert fire(ledger, only(ledger), 1001.0) == first
    assert only(ledger).last_job_id == (first or [0])[0]


def test_a_tick_can_bring_news(ledger: Ledger) -> None:
    ledger.schedules.know([definition()], "app")
    ledger.schedules.fire(Firing("nightly", 1, 5.0, None, (), "schedule_missed", "three of them"))
    assert [(event.kind, event.message) for event in ledger.events.list()] == [("schedule_missed", "three of them")]


def test_a_removed_schedule_is_gone(ledger: Ledger) -> None:
    ledger.schedules.know([definition()], "app")
    early = only(ledger)
    assert ledger.schedules.remove("nightly", "me")
    assert not ledger.schedules.remove("nightly", "me")
    assert ledger.schedules.list() == []
    assert fire(ledger, early, 1000.0) is None
    assert [event.kind for event in ledger.events.list()] == ["schedule_removed"]


def plan(ledger: Ledger, name: str, late_s: float, job: bytes | None = None, **changes: Any) -> None:
    """Write a schedule of an operator that has been due for so long."""
    packed = pack_job(new_job()) if job is None else job
    timing = changes.pop("timing", Timing(every_s=3600.0))
    ledger.schedules.know([ScheduleDefinition(name, "add", "default", timing, packed, **changes)], "operator")
    now = ledger.schedules.due([]).now
    version = next(record.version for record in ledger.schedules.list() if record.name == name)
    assert ledger.schedules.fire(Firing(name, version, (now - late_s) // 3600 * 3600, None)) == []


@pytest.mark.parametrize(("catch_up", "count"), [("skip", 0), ("latest", 1), ("all", 3)])
def test_what_was_missed_is_made_up_for_by_the_rule(ledger: Ledger, catch_up: Any, count: int) -> None:
    # Between the hours, so that no tick is on time.
    now = ledger.schedules.due([]).now
    timing = Timing(cron=f"{int(now // 60 + 30) % 60} * * * *")
    plan(ledger, "hourly", 0.0, timing=timing, catch_up=catch_up)
    [record] = ledger.schedules.list()
    first = now - 2.5 * 3600
    ledger.schedules.fire(Firing("hourly", record.version, first // 60 * 60, None))
    keeper = Scheduler(ledger, frozenset())
    assert keeper.step() == 0.0
    jobs = ledger.jobs.list(JobFilter())
    assert len(jobs) == count
    assert keeper.step() > 0.0, "each tick once"
    assert len(ledger.jobs.list(JobFilter())) == count
    told = [event.message for event in ledger.events.list() if event.kind == "schedule_missed"]
    assert len(told) == (catch_up != "all")
    for job in jobs:
        whole = ledger.jobs.get(job.id)
        assert whole is not None
        assert (decode_call(whole.payload).scheduled_for or 0.0) < now
        assert (whole.enqueued_by or "").startswith("schedule hourly for ")


def test_a_schedule_that_cannot_be_read_does_not_stop_the_others(ledger: Ledger) -> None:
    plan(ledger, "a-broken", 10.0, job=b"not a job at all")
    plan(ledger, "b-zone", 10.0, timing=Timing(cron="* * * * *", zone="Moon/Base"))
    plan(ledger, "c-good", 10.0)
    keeper = Scheduler(ledger, frozenset())
    assert 0.0 < keeper.step() < LOOK_EVERY_S, "it neither gives up nor turns at full speed"
    assert [job.enqueued_by for job in ledger.jobs.list(JobFilter()) if "c-good" in (job.enqueued_by or "")]


def test_where_nothing_is_planned_it_sleeps_long(ledger: Ledger) -> None:
    assert Scheduler(ledger, frozenset()).step() == LOOK_EVERY_S


@pytest.mark.parametrize("listens", ["by itself", "is told"])
def test_a_reaper_without_workers_fires_a_schedule_that_is_made_while_it_sleeps(
    ledger: Ledger, open_again: OpenLedger, monkeypatch: pytest.MonkeyPatch, listens: str
) -> None:
    """Only the wake-up can tell it in time: by itself it would look again after an hour."""
    monkeypatch.setattr(scheduler, "LOOK_EVERY_S", 3600.0)
    laps, fired, stop = threading.Semaphore(0), threading.Event(), threading.Event()
    step = Scheduler.step

    def noted(self: Scheduler) -> float:
        wait_s = step(self)
        laps.release()
        if wait_s == 0.0:
            fired.set()
        return wait_s

    monkeypatch.setattr(Scheduler, "step", noted)
    wakeups = ScheduleWakeUps() if listens == "is told" else None
    thread = threading.Thread(target=run_daemon, args=(open_again(), Recovery(), stop), kwargs={"wakeups": wakeups})
    thread.start()
    try:
        # One that listens by itself looks once more when it begins to hear.
        for _ in range(2 if wakeups is None else 1):
            assert laps.acquire(timeout=TIMEOUT_S)
        plan(ledger, "late", 0.0, catch_up="latest")
        if wakeups is None:
            ledger.notify({"schedules"})
        else:
            wakeups.heard(frozenset({"queue:default"}))
            wakeups.heard(frozenset({"schedules"}))
        assert fired.wait(TIMEOUT_S)
    finally:
        stop.set()
        thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    assert {"late" in (job.enqueued_by or "") for job in ledger.jobs.list(JobFilter())} == {True}


# A definition that only a short-lived worker had ------------------------------------------------


def defined(every_s: float) -> ScheduleDefinition:
    return ScheduleDefinition("nightly", "add", "default", Timing(every_s=every_s), pack_job(new_job()))


def join(ledger: Ledger, worker_id: str, *definitions: ScheduleDefinition) -> None:
    """Start a worker whose code has these schedules, as `unstuck worker` does."""
    ledger.workers.register(birth(worker_id, metadata={"schedules": [one.fingerprint for one in definitions]}))
    ledger.schedules.know(definitions, "app")


def in_force(ledger: Ledger) -> float | None:
    [record] = ledger.schedules.list()
    return record.timing.every_s


def test_a_living_worker_restores_the_schedule_that_a_canary_changed(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = defined(60.0), defined(61.0)
    join(ledger, "w1", old)
    Scheduler(ledger, [old]).step()
    restorer = ScheduleRestorer(ledger, [old])
    join(ledger, "canary", new)
    ledger.schedules.pause("nightly", True, "ops")
    restorer.look()
    assert in_force(ledger) == 61.0, "a worker lives that has it so"
    ledger.workers.stop("canary")
    restorer.look()
    [record] = ledger.schedules.list()
    assert (record.timing.every_s, record.fingerprint, record.paused) == (60.0, old.fingerprint, True)
    [told] = [event for event in ledger.events.list() if event.kind == "schedule_restored"]
    assert "nightly" in told.message
    restorer.look()
    assert len([event for event in ledger.events.list() if event.kind == "schedule_restored"]) == 1
    # The thread of a worker does so by itself.
    join(ledger, "second canary", new)
    ledger.workers.stop("second canary")
    monkeypatch.setattr("unstuck.maintenance.schedule_restore.LOOK_EVERY_S", 0.0)
    Scheduler(ledger, [old]).step()
    assert in_force(ledger) == 60.0


def test_a_schedule_that_was_removed_or_taken_over_by_an_operator_is_not_restored(ledger: Ledger) -> None:
    old = defined(60.0)
    join(ledger, "w1", old)
    restorer = ScheduleRestorer(ledger, [old])
    ledger.schedules.know([defined(61.0)], "operator")
    restorer.look()
    assert in_force(ledger) == 61.0
    ledger.schedules.remove("nightly", "ops")
    restorer.look()
    assert ledger.schedules.list() == []
