"""The ledger's clock is set back by an hour: a retry waits for its backoff, and not an hour longer."""

import time

import pytest
from tests.contract.hands import birth, failure_retry, new_job, put, run, turn
from tests.contract.meddling import Meddler
from tests.fleet import wait_for

from unstuck.config import Recovery
from unstuck.domain.schedules import ScheduleDefinition
from unstuck.domain.states import JobState
from unstuck.domain.ticking import Timing
from unstuck.domain.watch import Tick
from unstuck.reaper.rounds import Round
from unstuck.reaper.sweep import Reaper
from unstuck.reaper.timekeeper import Timekeeper
from unstuck.store.contract import Ledger
from unstuck.store.records import ConditionChange, JobFilter, Pulse, pack_job

HOUR_S = 3600.0


def round_of(ledger: Ledger, meddler: Meddler) -> Round:
    """A round that looks after everything, as one does every few seconds."""
    for ticket in ("sweep", "order"):
        meddler.expire_ticket(ticket)
    return Reaper(ledger, Recovery(), by="reaper").round()


def test_a_retry_waits_for_its_backoff_and_not_until_the_clock_has_caught_up(
    ledger: Ledger, w1: str, meddler: Meddler
) -> None:
    put(ledger)
    [job] = run(ledger)
    turn(ledger, endings=[failure_retry(job, delay_s=60.0)])
    round_of(ledger, meddler)
    meddler.set_clock_back(HOUR_S)
    round_of(ledger, meddler)
    due_in_s = ledger.promote_due(10).next_due_in_s
    assert due_in_s is not None
    assert due_in_s == pytest.approx(60.0, abs=30.0), "not an hour and a minute"
    # Once is enough: the same step is not seen again.
    round_of(ledger, meddler)
    again_in_s = ledger.promote_due(10).next_due_in_s
    assert again_in_s == pytest.approx(due_in_s, abs=10.0)


def test_a_retry_waits_for_its_backoff_though_no_reaper_saw_the_clock_set_back(
    ledger: Ledger, w1: str, meddler: Meddler
) -> None:
    """The clock was ahead and was set back again while no reaper ran: what it noted before and after is the same."""
    put(ledger)
    [job] = run(ledger)
    turn(ledger, endings=[failure_retry(job, delay_s=60.0)])
    round_of(ledger, meddler)
    meddler.set_clock_back(HOUR_S)
    meddler.note_clock()
    for _ in range(2):
        round_of(ledger, meddler)
        assert ledger.promote_due(10).next_due_in_s == pytest.approx(60.0, abs=30.0)


def test_a_heartbeat_is_not_of_long_ago_though_the_clock_was_set_back_for_a_moment(
    ledger: Ledger, w1: str, meddler: Meddler
) -> None:
    ledger.tick(Tick(None, 1.0))
    meddler.move_watch(HOUR_S)
    ledger.beat(Pulse("w1", 0, 0))
    ledger.register(birth("w2"))
    meddler.move_watch(-HOUR_S)
    meddler.move_beats(-HOUR_S)
    ledger.tick(Tick(1000.0, 1.0))
    assert [worker.silent_s < 60.0 for worker in ledger.watch()] == [True, True]
    assert [worker.since_beat_s < 60.0 for worker in ledger.watch()] == [True, True]


def test_a_time_that_a_caller_named_stays(ledger: Ledger, w1: str, meddler: Meddler) -> None:
    put(ledger, delay_s=60.0)
    round_of(ledger, meddler)
    meddler.set_clock_back(HOUR_S)
    round_of(ledger, meddler)
    assert ledger.promote_due(10).next_due_in_s == pytest.approx(HOUR_S + 60.0, abs=30.0)


def test_a_job_that_runs_began_before_now(ledger: Ledger, w1: str, meddler: Meddler) -> None:
    """Otherwise its deadline comes an hour late if its worker dies."""
    put(ledger)
    [job] = run(ledger)
    round_of(ledger, meddler)
    meddler.set_clock_back(HOUR_S)
    round_of(ledger, meddler)
    [held] = ledger.jobs(JobFilter(states=(JobState.RUNNING,)))
    assert held.id == job.job_id
    assert held.started_at is not None
    assert held.claimed_at is not None
    assert held.started_at == pytest.approx(time.time(), abs=30.0), "the step is taken from it"
    assert held.claimed_at <= held.started_at <= time.time()


def test_reminders_of_a_condition_go_on(ledger: Ledger, w1: str, meddler: Meddler) -> None:
    ledger.change_conditions([ConditionChange("begun", "queue_stuck", "queue:mail", "It is stuck")], 0.0)
    round_of(ledger, meddler)
    meddler.set_clock_back(HOUR_S)
    round_of(ledger, meddler)
    assert ledger.change_conditions([ConditionChange("lasting", "queue_stuck", "queue:mail", "Still")], 0.0) == 1


def test_a_clock_that_goes_on_is_left_alone(ledger: Ledger, w1: str, meddler: Meddler) -> None:
    put(ledger)
    [job] = run(ledger)
    turn(ledger, endings=[failure_retry(job, delay_s=7200.0)])
    for _ in range(3):
        round_of(ledger, meddler)
    assert ledger.promote_due(10).next_due_in_s == pytest.approx(7200.0, abs=30.0)


def test_a_ticket_from_the_future_can_be_taken(ledger: Ledger, w1: str, meddler: Meddler) -> None:
    assert ledger.take_ticket("sweep", 10.0)
    meddler.set_clock_back(HOUR_S)
    assert ledger.take_ticket("sweep", 10.0) == (meddler.dialect == "postgresql"), "SQLite goes by the boot clock"


def test_an_interval_goes_on(ledger: Ledger, w1: str, meddler: Meddler) -> None:
    job = pack_job(new_job())
    every = ScheduleDefinition("often", "add", "default", Timing(every_s=1.0), job)
    ledger.know_schedules([every], "app")
    keeper = Timekeeper(ledger, [every])
    keeper.step()
    wait_for(lambda: keeper.step() == 0.0, "the first tick")
    meddler.set_clock_back(HOUR_S)
    keeper.step()
    before = ledger.count_jobs()["pending"]
    wait_for(lambda: keeper.step() == 0.0 and ledger.count_jobs()["pending"] > before, "the next tick")
