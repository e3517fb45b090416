"""The ledger's clock is set back by an hour: a retry waits for its backoff, and not an hour longer."""

import pytest
from tests.contract.hands import failure_retry, new_job, put, run, turn
from tests.contract.meddling import Meddler
from tests.fleet import wait_for

from unstuck.config import Recovery
from unstuck.domain.schedules import ScheduleDefinition
from unstuck.domain.ticking import Timing
from unstuck.reaper.rounds import Round
from unstuck.reaper.sweep import Reaper
from unstuck.reaper.timekeeper import Timekeeper
from unstuck.store.contract import Ledger
from unstuck.store.records import ConditionChange, pack_job

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


def test_a_time_that_a_caller_named_stays(ledger: Ledger, w1: str, meddler: Meddler) -> None:
    put(ledger, delay_s=60.0)
    round_of(ledger, meddler)
    meddler.set_clock_back(HOUR_S)
    round_of(ledger, meddler)
    assert ledger.promote_due(10).next_due_in_s == pytest.approx(HOUR_S + 60.0, abs=30.0)


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
    keeper = Timekeeper(ledger, frozenset({every.fingerprint}))
    keeper.step()
    wait_for(lambda: keeper.step() == 0.0, "the first tick")
    meddler.set_clock_back(HOUR_S)
    keeper.step()
    before = ledger.count_jobs()["pending"]
    wait_for(lambda: keeper.step() == 0.0 and ledger.count_jobs()["pending"] > before, "the next tick")
