"""The doctor finds retention that falls behind, and says by how long."""

import pytest
from tests.support.backdoor import Backdoor
from tests.support.builders import done, new_job, put, run, turn
from tests.support.doctor import codes

from unstuck.config import Settings
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.jobs import JobExtras

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S


def overkept(ledger: Ledger) -> dict[str, float]:
    return {one.kind: one.past_s for one in ledger.diagnose(far_s=DAY_S, late_s=30.0).overkept}


def finish(ledger: Ledger, meddler: Backdoor, count: int, **changes: object) -> int:
    first = put(ledger, **changes)
    [job] = run(ledger)
    turn(ledger, done=[done(job)])
    meddler.copy_job(first, count - 1)
    return first


def test_finished_jobs_that_should_be_gone_are_found(ledger: Ledger, w1: str, url: str, meddler: Backdoor) -> None:
    # Scheduled long ago for next year: old, and not to be removed.
    ledger.jobs.enqueue([new_job(delay_s=365 * DAY_S) for _ in range(100)])
    finish(ledger, meddler, 1_000)
    meddler.age_all_jobs(7 * DAY_S + 2 * HOUR_S)
    finish(ledger, meddler, 1_000)
    assert overkept(ledger) == {"jobs": pytest.approx(2 * HOUR_S, abs=60.0)}
    assert "retention-behind" in codes(ledger, Settings(url=url))
    while ledger.maintenance.sweep_old(7 * DAY_S, DAY_S, DAY_S, 10_000).more:
        pass
    assert overkept(ledger) == {}
    assert "retention-behind" not in codes(ledger, Settings(url=url))


def test_a_ledger_that_is_kept_in_order_gives_no_finding(ledger: Ledger, w1: str, url: str, meddler: Backdoor) -> None:
    assert overkept(ledger) == {}
    finish(ledger, meddler, 1_000)
    put(ledger)
    meddler.age_all_jobs(6 * DAY_S)
    assert overkept(ledger) == {}
    # A minute passes before retention looks again.
    meddler.age_all_jobs(DAY_S + 60.0)
    assert "retention-behind" not in codes(ledger, Settings(url=url))


def test_events_keys_and_jobs_with_a_keep_of_their_own_are_found_too(
    ledger: Ledger, w1: str, url: str, meddler: Backdoor
) -> None:
    meddler.add_events(3_000)
    meddler.age_events(8 * DAY_S)
    ledger.jobs.enqueue([new_job(unique_key=f"k{n}", more=JobExtras(unique_for_s=60.0)) for n in range(50)])
    meddler.age_keys(60.0 + HOUR_S)
    late = {"events": pytest.approx(DAY_S, abs=60.0), "keys": pytest.approx(HOUR_S, abs=60.0)}
    assert overkept(ledger) == late
    finish_own_keep(ledger, meddler)
    assert overkept(ledger) == {**late, "jobs": pytest.approx(2 * HOUR_S, abs=120.0)}
    assert "retention-behind" in codes(ledger, Settings(url=url))


def finish_own_keep(ledger: Ledger, meddler: Backdoor) -> None:
    first = put(ledger, more=JobExtras(retain_s=60.0), priority=10)
    [job] = run(ledger, limit=1)
    assert job.job_id == first
    turn(ledger, done=[done(job)])
    meddler.age_job(first, 2 * HOUR_S)
    meddler.copy_job(first, 29)
