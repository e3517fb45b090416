"""Numbers at the edge: times without a date, timeouts without an end, ids that are none."""

import math
from typing import Any

import pytest
from tests.contract.hands import claim, new_job, put, wish

from unstuck.domain.errors import RefusedValue
from unstuck.store.contract import Ledger
from unstuck.store.records import JobFilter, Pulse

UNUSABLE: tuple[dict[str, Any], ...] = (
    {"run_at": math.inf},
    {"run_at": -math.inf},
    {"run_at": math.nan},
    {"run_at": 1e12},
    {"delay_s": math.inf},
    {"delay_s": math.nan},
    {"timeout_s": math.inf},
    {"timeout_s": 1e300},
    {"heartbeat_timeout_s": math.nan},
    {"priority": 1001},
)


@pytest.mark.parametrize("numbers", UNUSABLE, ids=str)
def test_a_number_that_no_clock_can_reach_is_refused_and_nobody_else_is_stopped(
    ledger: Ledger, w1: str, numbers: dict[str, Any]
) -> None:
    with pytest.raises(RefusedValue):
        ledger.enqueue([new_job(), new_job(**numbers)])
    assert ledger.jobs(JobFilter()) == []
    job_id = put(ledger)
    assert [job.job_id for job in claim(ledger)] == [job_id]
    assert wish(ledger).alive
    assert ledger.promote_due(10).count == 0


def test_a_moment_long_ago_and_one_far_ahead_are_moments(ledger: Ledger, w1: str) -> None:
    long_ago = put(ledger, run_at=-1e9)
    far_ahead = put(ledger, run_at=2e11)
    assert [job.job_id for job in claim(ledger)] == [long_ago]
    [queue] = ledger.queues()
    assert (queue.scheduled, queue.claimed) == (1, 1)
    record = ledger.job(far_ahead)
    assert record is not None
    assert record.run_at == 2e11


@pytest.mark.parametrize("job_id", [2**63, -(2**63) - 1, 10**30])
def test_an_id_beyond_all_ids_is_refused_in_one_sentence(ledger: Ledger, job_id: int) -> None:
    known = put(ledger)
    for ask in (
        lambda: ledger.outcomes([known, job_id]),
        lambda: ledger.missing([known, job_id]),
        lambda: ledger.cancel([known, job_id], "me"),
        lambda: ledger.retry([known, job_id], "me"),
    ):
        with pytest.raises(RefusedValue):
            ask()
    assert ledger.missing([known, 2**63 - 1, -1]) == {2**63 - 1, -1}


def test_a_lone_surrogate_in_an_operators_word_or_a_beat_is_refused(ledger: Ledger, w1: str) -> None:
    with pytest.raises(RefusedValue):
        ledger.pause("\ud800", "me")
    with pytest.raises(RefusedValue):
        ledger.beat(Pulse("w1", 0, 0, {"note": "\ud800"}))
