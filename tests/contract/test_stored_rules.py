"""The recovery settings that hold for a worker and its jobs are stored with them: whoever judges reads them there."""

import os
from typing import Any

import pytest
from tests.contract.conftest import OpenLedger
from tests.support.backdoor import Backdoor
from tests.support.builders import birth, claim_jobs, done, put, running, turn

from unstuck import App, Recovery
from unstuck.client.operator import Operator
from unstuck.config import Retention, Settings
from unstuck.domain.policy import Policy, decode_policy, encode_policy
from unstuck.domain.recovery_rules import RecoveryRules
from unstuck.domain.states import JobState, WorkerState
from unstuck.domain.worker_health import Health
from unstuck.ledger.contract import Ledger
from unstuck.maintenance.service import run_once
from unstuck.recovery.reap import Reaper

DAY_S = 86400.0
ELSEWHERE = {"host": "elsewhere", "pid": 1, "process_started": "1"}
OFF = Recovery(auto_fail_stale_running=False, auto_requeue_stale_claimed=False)
RESERVED = encode_policy(Policy(auto_fail_stale_running=False, auto_requeue_stale_claimed=False))
NO_PAUSE: Any = {"pause": lambda wait_s: None}


def state(ledger: Ledger, job_id: int) -> JobState:
    record = ledger.jobs.get(job_id)
    assert record is not None
    return record.state


def worker(ledger: Ledger, worker_id: str = "w1") -> Any:
    return next(one for one in ledger.workers.list() if one.id == worker_id)


def silent(ledger: Ledger, meddler: Backdoor, rules: RecoveryRules | None, policy: bytes = b"") -> tuple[int, int]:
    """A worker that fell silent long ago with a running and a claimed job; give both."""
    ledger.workers.register(birth("w1", rules=rules, **ELSEWHERE))
    runs = running(ledger, policy=policy).job_id
    claimed = put(ledger, policy=policy)
    assert [job.job_id for job in claim_jobs(ledger)] == [claimed]
    meddler.age_beat("w1", 3600.0)
    return runs, claimed


@pytest.mark.parametrize(
    ("stored", "here", "policy", "left"),
    [
        pytest.param(OFF.rules, Recovery(), b"", True, id="the worker's rules, not the reaper's"),
        pytest.param(Recovery().rules, OFF, b"", False, id="switched off here alone"),
        pytest.param(None, OFF, b"", True, id="a worker that stored none"),
        pytest.param(Recovery().rules, Recovery(), RESERVED, True, id="the app that enqueued the job"),
    ],
)
def test_whether_an_operator_decides_is_read_where_it_is_stored(
    ledger: Ledger, meddler: Backdoor, stored: RecoveryRules | None, here: Recovery, policy: bytes, left: bool
) -> None:
    jobs = silent(ledger, meddler, stored, policy)
    done = run_once(ledger, here, **NO_PAUSE)
    assert (done.left, done.settled) == ((2, 0) if left else (0, 2))
    expected = (JobState.RUNNING, JobState.CLAIMED) if left else (JobState.FAILED, JobState.PENDING)
    assert tuple(state(ledger, job) for job in jobs) == expected
    assert worker(ledger).state is (WorkerState.SUSPECT if left else WorkerState.DEAD)


def test_half_of_it_is_stored_too(ledger: Ledger, meddler: Backdoor) -> None:
    runs, claimed = silent(ledger, meddler, RecoveryRules(auto_fail_stale_running=False))
    run_once(ledger, Recovery(), **NO_PAUSE)
    assert (state(ledger, runs), state(ledger, claimed)) == (JobState.RUNNING, JobState.PENDING)


@pytest.mark.parametrize("policy", [b"", RESERVED], ids=["its worker's rules", "its own"])
def test_advice_about_a_job_is_right_without_the_app(
    ledger: Ledger, meddler: Backdoor, url: str, policy: bytes
) -> None:
    runs, claimed = silent(ledger, meddler, Recovery().rules if policy else OFF.rules, policy)
    operator = Operator(ledger, Settings(url=url))
    for job, verb in ((runs, "--fail"), (claimed, "--requeue")):
        expected = f"automatic recovery is switched off: `unstuck stale {verb}` settles it by hand"
        assert expected in str(operator.explain_wait(job))
        assert expected in operator.doing(job)
        found = " ".join(f"{one.what} {one.why} {one.cure}" for one in operator.doctor_job(job))
        assert "switched off" in found
        assert f"unstuck stale {verb}" in found
        assert "switched off" in repr(operator.why(job))


def test_a_running_job_is_given_up_after_its_workers_timeout_and_not_after_ours(
    ledger: Ledger, meddler: Backdoor, url: str
) -> None:
    facts = {**ELSEWHERE, "suspect_after_s": 5.0, "running_stale_after_s": 7200.0}
    ledger.workers.register(birth("w1", rules=Recovery().rules, **facts))
    job = running(ledger).job_id
    meddler.age_beat("w1", 3600.0)
    assert "is given up after 2h" in str(Operator(ledger, Settings(url=url)).explain_wait(job))


def test_a_reaper_that_runs_elsewhere_is_known_to_settle_the_job(ledger: Ledger, meddler: Backdoor, url: str) -> None:
    runs, _ = silent(ledger, meddler, Recovery().rules)
    operator = Operator(ledger, Settings(url=url))
    assert "no living worker is there to settle it" in str(operator.explain_wait(runs))
    assert ledger.maintenance.take_ticket("sweep", 60.0)
    assert "the reaper settles it in its next rounds" in str(operator.explain_wait(runs))


def test_a_worker_that_does_not_want_the_word_of_neighbours_is_not_judged_by_it(ledger: Ledger) -> None:
    gone = {"pid": 2**22 - 1, "process_started": "1", "suspect_after_s": 600.0, "heartbeat_interval_s": 5.0}
    ledger.workers.register(birth("quiet", rules=RecoveryRules(evidence=()), **gone))
    ledger.workers.register(birth("usual", rules=RecoveryRules(), **gone))
    Reaper(ledger, Recovery(evidence=()), by="reaper").sweep()
    assert worker(ledger, "quiet").state is WorkerState.ACTIVE
    assert worker(ledger, "usual").state is WorkerState.DEAD


def test_whether_a_worker_may_be_disabled_is_stored_with_it(ledger: Ledger, meddler: Backdoor) -> None:
    sick = {"health": {"weight": 9.0, "deaths": 9, "jobs": 9, "score": 0.3}}
    calm = {"suspect_after_s": 600.0, "heartbeat_interval_s": 5.0, "pid": os.getpid()}
    ledger.workers.register(birth("sick", rules=RecoveryRules(auto_disable_unhealthy=False), metadata=sick, **calm))
    ledger.workers.register(birth("well", rules=RecoveryRules(), metadata={"health": {"weight": 0.0}}, **calm))
    assert {one.id: one.may_be_disabled for one in ledger.workers.standings()} == {"sick": False, "well": True}
    assert next(one for one in ledger.workers.standings() if one.id == "sick").health == Health(9.0, 9, 9, 0.3)
    assert Reaper(ledger, Recovery(), by="reaper").sweep().disabled == 0
    ledger.workers.register(birth("ill", rules=RecoveryRules(), metadata=sick, **calm))
    meddler.expire_ticket("health")
    assert Reaper(ledger, Recovery(auto_disable_unhealthy=False), by="reaper").sweep(ticket=False).disabled == 1
    assert worker(ledger, "ill").disabled is not None


def test_nothing_is_removed_that_a_worker_of_any_app_keeps(
    ledger: Ledger, meddler: Backdoor, url: str, open_again: OpenLedger
) -> None:
    long = Recovery(retention=Retention(jobs="30d", events="30d", workers="30d"))
    ledger.workers.register(birth("w1", rules=long.rules, **ELSEWHERE))
    ledger.workers.register(birth("w2", rules=Recovery(retention="1d").rules, **ELSEWHERE))
    job = running(ledger)
    turn(ledger, done=[done(job)])
    ledger.workers.stop("w1")
    meddler.age_all_jobs(10 * DAY_S)
    run_once(ledger, Recovery(), **NO_PAUSE)
    assert state(ledger, job.job_id) is JobState.SUCCEEDED
    operator = Operator(ledger, Settings(url=url))
    assert operator.jobs.retention_s() == 30 * DAY_S
    assert operator.jobs.prune() == 0
    assert not open_again().diagnose(far_s=DAY_S, late_s=30.0).overkept
    meddler.age_all_jobs(21 * DAY_S)
    assert operator.jobs.prune() == 1


def test_what_a_worker_stores_comes_back_whole(ledger: Ledger) -> None:
    rules = Recovery(session_grace="9s", evidence="none", check_interval="7s").rules
    ledger.workers.register(birth("w1", rules=rules))
    assert worker(ledger).rules == rules
    assert ledger.recovery.watch()[0].rules == rules
    assert ledger.recovery.to_judge()[0][0].rules == rules
    assert ledger.recovery.rules() == [rules]
    assert worker(ledger).running_stale_after_s == birth().running_stale_after_s


def test_tasks_of_an_app_bring_its_switches_to_every_job(url: str) -> None:
    app = App(url, recovery=Recovery(auto_fail_stale_running=False))
    try:

        @app.task
        def add() -> None: ...

        policy = decode_policy(encode_policy(app.definition().tasks["add"].policy))
        assert (policy.auto_fail_stale_running, policy.auto_requeue_stale_claimed) == (False, True)
        job = app.job(add.enqueue().id)
        record = app.operator.jobs.get(job.id)
        assert not decode_policy(record.policy).auto_fail_stale_running
    finally:
        app.close()
