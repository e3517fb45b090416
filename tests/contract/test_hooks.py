"""Hooks in the ledger: enqueued in the transaction that ended the attempt, whoever ended it, and once."""

from typing import Any

import msgspec
import pytest
from tests.support.builders import (
    QUEUE,
    crash,
    crash_retry,
    done,
    failure,
    failure_retry,
    put,
    release,
    running,
    turn,
    verdict,
)

from unstuck.domain.endings import Ending, JobError
from unstuck.domain.policy import HOOK_KINDS, Policy, encode_policy, fires
from unstuck.domain.states import AttemptState, JobState
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.jobs import JobExtras, JobFilter
from unstuck.ledger.contract.recovery import GuardDead, GuardNone
from unstuck.ledger.contract.workers import Claimed

POLICY = encode_policy(Policy(on_crash="retry", timeout_s=7.0))
HOOKS = {kind: [{"task": f"after_{kind}", "queue": "hooks"}] for kind in HOOK_KINDS}


def hooked(ledger: Ledger, hooks: dict[str, Any] | None = None) -> Claimed:
    return running(ledger, more=JobExtras(hooks=hooks or HOOKS))


def followers(ledger: Ledger) -> list[str]:
    return [job.task for job in reversed(ledger.jobs.list(JobFilter(queue="hooks")))]


def event_of(ledger: Ledger, task: str) -> dict[str, Any]:
    [found] = ledger.jobs.list(JobFilter(queue="hooks", task=task))
    record = ledger.jobs.get(found.id)
    assert record is not None
    return dict(msgspec.json.decode(record.payload)["kwargs"]["event"])


def quarantine(job: Claimed) -> Ending:
    error = JobError("CRASHED_TOO_OFTEN", "Worker died unexpectedly", "killed by SIGSEGV")
    return Ending(job.job_id, job.token, JobState.QUARANTINED, AttemptState.CRASHED, error=error, counter="crash")


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (failure, ["after_failure"]),
        (failure_retry, ["after_retry"]),
        (crash, ["after_failure", "after_crash"]),
        (crash_retry, ["after_crash", "after_retry"]),
        (quarantine, ["after_failure", "after_crash"]),
    ],
)
def test_each_end_calls_for_its_own(ledger: Ledger, w1: str, end: Any, expected: list[str]) -> None:
    job = hooked(ledger)
    ending = end(job)
    assert not turn(ledger, endings=[ending]).superseded
    assert followers(ledger) == expected == [f"after_{kind}" for kind in fires(ending.attempt, ending.state)]


def test_a_success_calls_for_its_own_and_says_so(ledger: Ledger, w1: str) -> None:
    job = hooked(ledger)
    turn(ledger, done=[done(job)])
    assert followers(ledger) == ["after_success"]
    assert event_of(ledger, "after_success") == {
        "kind": "success",
        "job_id": job.job_id,
        "task": "add",
        "queue": QUEUE,
        "state": "succeeded",
        "attempt": 1,
        "code": None,
        "message": None,
        "cause": None,
    }


def test_a_failure_tells_why(ledger: Ledger, w1: str) -> None:
    job = hooked(ledger)
    turn(ledger, endings=[failure(job)])
    event = event_of(ledger, "after_failure")
    assert (event["kind"], event["state"], event["code"]) == ("failure", "failed", "TASK_FAILED")
    assert (event["message"], event["cause"]) == ("boom", "because")


def test_a_hook_runs_by_the_rules_of_its_own_task_and_has_no_hooks(ledger: Ledger, w1: str) -> None:
    spec = {"task": "tell", "queue": "hooks", "policy": POLICY.decode(), "on_crash": "retry", "timeout_s": 7.0}
    job = hooked(ledger, {"success": [spec, {"task": "other", "queue": "hooks", "more": {"expires_in_s": 60.0}}]})
    turn(ledger, done=[done(job)])
    assert followers(ledger) == ["tell", "other"]
    [found] = ledger.jobs.list(JobFilter(task="tell"))
    record = ledger.jobs.get(found.id)
    assert record is not None
    assert (record.policy, record.enqueued_by) == (POLICY, f"after_success of job {job.job_id}")
    # Its own end calls for nothing.
    [held] = ledger.workers.turn(_wish("tell")).claimed
    turn(ledger, done=[done(held)])
    assert followers(ledger) == ["tell", "other"]


def _wish(task: str) -> Any:
    from unstuck.ledger.contract.workers import ClaimRequest, Turn

    return Turn("w1", claim_request=ClaimRequest(("hooks",), (task,), 10, start=10))


def test_whoever_lost_the_attempt_calls_for_nothing(ledger: Ledger, w1: str, w2: str) -> None:
    job = hooked(ledger)
    assert ledger.recovery.declare_dead(w1, verdict(), GuardNone())
    assert ledger.recovery.settle(w1, [crash_retry(job)], [], GuardDead())
    assert ledger.recovery.settle(w1, [crash_retry(job)], [], GuardDead()) == set()
    assert not turn(ledger, w1, done=[done(job)]).alive
    assert followers(ledger) == ["after_crash", "after_retry"]


def test_an_end_that_is_handed_in_twice_calls_once(ledger: Ledger, w1: str) -> None:
    job = hooked(ledger)
    turn(ledger, endings=[failure(job)])
    turn(ledger, endings=[failure(job)])
    turn(ledger, done=[done(job)])
    assert followers(ledger) == ["after_failure"]


def test_what_is_given_back_or_cancelled_calls_for_nothing(ledger: Ledger, w1: str) -> None:
    job = hooked(ledger)
    turn(ledger, release=[release(job)])
    assert ledger.jobs.cancel([job.job_id], "me") == {job.job_id: "cancelled"}
    waiting = put(ledger, more=JobExtras(hooks=HOOKS))
    ledger.queues.purge(QUEUE, "me")
    record = ledger.jobs.get(waiting)
    assert record is not None
    assert record.state is JobState.CANCELLED
    assert followers(ledger) == []


def test_many_at_once_each_call_for_their_own(ledger: Ledger, w1: str) -> None:
    jobs = [hooked(ledger) for _ in range(5)]
    turn(ledger, done=[done(job) for job in jobs[:3]], endings=[failure(job) for job in jobs[3:]])
    assert sorted(followers(ledger)) == ["after_failure"] * 2 + ["after_success"] * 3
