"""Jobs for later: they wait, become due, and wake whoever serves them."""

import time

import pytest
from tests.contract.hands import claim, crash_retry, new_job, put, running, turn, wish
from tests.contract.meddling import Meddler

from unstuck.store.contract import Ledger


def test_a_delayed_job_waits_and_says_when_it_is_due(ledger: Ledger, w1: str) -> None:
    put(ledger, delay_s=60.0)
    answer = wish(ledger)
    assert answer.claimed == ()
    assert answer.next_due_in_s == pytest.approx(60, abs=5)
    assert ledger.promote_due(10).count == 0


def test_run_at_wins_over_a_delay(ledger: Ledger, w1: str) -> None:
    put(ledger, delay_s=1000.0, run_at=time.time() + 60)
    assert wish(ledger).next_due_in_s == pytest.approx(60, abs=5)


def test_a_time_in_the_past_means_now(ledger: Ledger, w1: str) -> None:
    job_id = put(ledger, run_at=time.time() - 1000)
    assert [job.job_id for job in claim(ledger)] == [job_id]


def test_what_is_due_becomes_ready_and_its_queues_are_named(ledger: Ledger, w1: str, meddler: Meddler) -> None:
    due = put(ledger, queue="a", delay_s=60.0)
    put(ledger, queue="b", delay_s=600.0)
    meddler.age_job(due, 61)
    promoted = ledger.promote_due(10)
    assert (promoted.count, promoted.queues) == (1, {"a"})
    assert promoted.next_due_in_s == pytest.approx(600, abs=5)
    assert [job.job_id for job in claim(ledger, queues=("a", "b"))] == [due]


def test_promotion_is_bounded_and_goes_on_where_it_stopped(ledger: Ledger, w1: str, meddler: Meddler) -> None:
    ids = [answer.job_id for answer in ledger.enqueue([new_job(delay_s=60.0) for _ in range(5)])]
    for job_id in ids:
        meddler.age_job(job_id, 61)
    assert [ledger.promote_due(2).count for _ in range(4)] == [2, 2, 1, 0]
    assert len(claim(ledger)) == 5


def test_a_retry_waits_out_its_backoff_and_then_goes_first(ledger: Ledger, w1: str, meddler: Meddler) -> None:
    job = running(ledger)
    later = put(ledger)
    turn(ledger, endings=[crash_retry(job, delay_s=60)])
    answer = wish(ledger)
    assert [claimed.job_id for claimed in answer.claimed] == [later]
    assert answer.next_due_in_s == pytest.approx(60, abs=5)
    meddler.age_job(job.job_id, 61)
    assert ledger.promote_due(10).count == 1
    assert [claimed.job_id for claimed in claim(ledger)] == [job.job_id]


def test_the_next_due_time_is_that_of_the_queues_asked_for(ledger: Ledger, w1: str) -> None:
    put(ledger, queue="mine", delay_s=600.0)
    put(ledger, queue="other", delay_s=5.0)
    assert wish(ledger, queues=("mine",)).next_due_in_s == pytest.approx(600, abs=5)
    assert wish(ledger, queues=("none",)).next_due_in_s is None


def test_a_due_job_that_nobody_promoted_yet_is_due_at_once(ledger: Ledger, w1: str, meddler: Meddler) -> None:
    job_id = put(ledger, delay_s=60.0)
    meddler.age_job(job_id, 100)
    answer = wish(ledger)
    assert answer.claimed or answer.next_due_in_s == 0.0


def test_priority_counts_among_those_that_became_due(ledger: Ledger, w1: str, meddler: Meddler) -> None:
    low = put(ledger, delay_s=60.0)
    high = put(ledger, delay_s=60.0, priority=5)
    for job_id in (low, high):
        meddler.age_job(job_id, 61)
    ledger.promote_due(10)
    assert [job.job_id for job in claim(ledger)] == [high, low]
