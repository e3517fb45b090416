"""What becomes of one held job when its worker is taken for dead."""

import time
from typing import Any

import msgspec
import pytest

from unstuck.domain.endings import Ending, Release
from unstuck.domain.liveness import KERNEL, Detector, Session
from unstuck.domain.policy import Policy, encode_policy
from unstuck.domain.retry import RetryRule
from unstuck.domain.rules import RecoveryRules
from unstuck.domain.states import JobState, WorkerState
from unstuck.reaper.settling import Grounds, in_company, is_left, is_stale, overrun, settle
from unstuck.store.records import HeldJob, WorkerWatch


def job(policy: Policy | None = None, **changes: Any) -> HeldJob:
    facts: dict[str, Any] = {
        "job_id": 1,
        "token": 7,
        "worker_id": "w123",
        "state": JobState.RUNNING,
        "task": "t",
        "queue": "default",
        "policy": encode_policy(policy or Policy()),
        "failures": 0,
        "crashes": 0,
        "cancel_requested": False,
        "timeout_s": None,
        "heartbeat_timeout_s": 30.0,
        "held_s": 5.0,
        "running_s": 5.0,
        "silent_s": 4.0,
    }
    return HeldJob(**{**facts, **changes})


def grounds(detector: Detector | None = Detector.NEIGHBOUR, **changes: Any) -> Grounds:
    return Grounds(
        **{
            "worker_id": "w123",
            "host": "h",
            "detector": detector,
            "evidence": "its process no longer exists",
            **changes,
        }
    )


RETRY = Policy(on_crash="retry")
NEVER = Policy(on_crash="retry", overlap="never")


def ended(write: Ending | Release) -> Ending:
    assert isinstance(write, Ending)
    return write


@pytest.mark.parametrize("detector", [*Detector, None])
def test_a_claimed_job_goes_back_for_free_with_the_sentence_people_search_for(detector: Detector | None) -> None:
    write = settle(job(state=JobState.CLAIMED), grounds(detector))
    assert write == Release(1, 7, "requeued", "Task re-queued due to stale worker: w123")


def test_a_running_job_fails_with_the_cause_and_who_saw_it() -> None:
    ending = ended(settle(job(), grounds()))
    assert ending.state is JobState.FAILED
    assert ending.error is not None
    assert ending.error.message == "Worker died unexpectedly"
    assert ending.error.cause == "worker w123 on host h: its process no longer exists (neighbour)"


def test_a_running_job_that_may_be_retried_says_so_in_its_event() -> None:
    ending = ended(settle(job(RETRY), grounds()))
    assert (ending.state, ending.event, ending.counter) == (JobState.PENDING, "requeued", "crash")
    assert ending.message.startswith("Task re-queued due to stale worker: w123 (worker w123 on host h: ")


def test_a_job_whose_code_never_began_returns_for_free_where_that_is_proven() -> None:
    certain = grounds(cleared=True, entered=frozenset({8}))
    assert isinstance(settle(job(), certain), Release)
    assert isinstance(settle(job(token=8), certain), Ending)


@pytest.mark.parametrize(
    "unsure",
    [
        grounds(cleared=False, entered=frozenset()),
        grounds(cleared=True, entered=None),
        grounds(Detector.LEASE, cleared=True, entered=frozenset()),
        grounds(Detector.SESSION, cleared=True, entered=frozenset()),
        grounds(Detector.OPERATOR, cleared=True, entered=frozenset()),
    ],
)
def test_without_proof_every_running_job_counts_as_begun(unsure: Grounds) -> None:
    assert isinstance(settle(job(), unsure), Ending)


def test_a_cancelled_job_whose_code_never_began_is_cancelled_and_not_queued_again() -> None:
    ending = ended(settle(job(cancel_requested=True), grounds(cleared=True, entered=frozenset())))
    assert ending.state is JobState.CANCELLED


def test_what_a_stopped_worker_left_behind_counts_for_nobody() -> None:
    ending = ended(settle(job(RETRY, crashes=99), grounds(None, evidence="it stopped")))
    assert (ending.state, ending.counter) == (JobState.PENDING, "none")
    assert "(drain)" in ending.message


@pytest.mark.parametrize("detector", [Detector.SESSION, Detector.LEASE, Detector.OPERATOR, Detector.NEIGHBOUR])
def test_a_job_that_must_never_overlap_waits_for_the_end_of_the_lease(detector: Detector) -> None:
    assert ended(settle(job(NEVER, silent_s=4.0), grounds(detector))).delay_s >= 26.0
    assert ended(settle(job(RETRY, silent_s=4.0), grounds(detector))).delay_s < 1.0


@pytest.mark.parametrize("detector", sorted(KERNEL))
def test_proof_of_death_ends_that_wait(detector: Detector) -> None:
    assert ended(settle(job(NEVER), grounds(detector, cleared=True))).delay_s < 1.0


def test_a_job_without_heartbeat_that_must_never_overlap_waits_for_its_deadline() -> None:
    held = job(NEVER, heartbeat_timeout_s=None, timeout_s=100.0, running_s=40.0)
    assert ended(settle(held, grounds(Detector.SESSION))).delay_s == pytest.approx(60.0)


def test_an_overrun_job_asks_the_retry_policy_and_names_the_deadline() -> None:
    ending = overrun(job(timeout_s=10.0, running_s=45.0))
    assert ending.state is JobState.FAILED
    assert ending.error is not None
    assert ending.error.code == "DEADLINE_EXCEEDED"
    assert ending.error.cause == "ran for 45s, past its deadline of 10s; worker w123 did not end it"
    again = overrun(job(Policy(retry=RetryRule(max_attempts=2), overlap="never"), timeout_s=10.0, running_s=45.0))
    assert again.state is JobState.PENDING
    assert again.delay_s >= 26.0


def watched(silent_s: float, suspect_after_s: float) -> WorkerWatch:
    who = ("w", "name", "host", 1, "boot", "pid", "start", "trace")
    return WorkerWatch(*who, WorkerState.ACTIVE, silent_s, suspect_after_s, None, 1, Session.UNKNOWN, 0.0)


def test_each_job_is_stale_by_its_own_timeout() -> None:
    assert is_stale(job(), watched(silent_s=30.0, suspect_after_s=60.0))
    assert not is_stale(job(), watched(silent_s=29.9, suspect_after_s=10.0))
    assert not is_stale(job(heartbeat_timeout_s=None), watched(silent_s=9999.0, suspect_after_s=10.0))
    assert is_stale(job(state=JobState.CLAIMED), watched(silent_s=10.0, suspect_after_s=10.0))
    assert not is_stale(job(state=JobState.CLAIMED), watched(silent_s=9.9, suspect_after_s=10.0))


def test_switches_leave_the_silent_to_an_operator_but_not_what_the_kernel_saw() -> None:
    off = RecoveryRules(auto_requeue_stale_claimed=False, auto_fail_stale_running=False)
    for detector in Detector:
        silent = detector in (Detector.LEASE, Detector.SESSION)
        assert is_left(job(), detector, off) == silent
        assert is_left(job(state=JobState.CLAIMED), detector, off) == silent
        assert not is_left(job(), detector, RecoveryRules())
    half = RecoveryRules(auto_fail_stale_running=False)
    assert not is_left(job(state=JobState.CLAIMED), Detector.LEASE, half)
    assert is_left(job(), Detector.LEASE, half)


def test_a_job_that_its_own_app_reserved_for_an_operator_is_left_whoever_holds_it() -> None:
    reserved = Policy(auto_fail_stale_running=False)
    assert is_left(job(reserved), Detector.LEASE, RecoveryRules())
    assert not is_left(job(reserved, state=JobState.CLAIMED), Detector.LEASE, RecoveryRules())
    assert not is_left(job(reserved), Detector.NEIGHBOUR, RecoveryRules())


def test_a_policy_nobody_understands_still_lets_the_job_end() -> None:
    ending = ended(settle(msgspec.structs.replace(job(), policy=b"\xff not json"), grounds()))
    assert ending.state is JobState.FAILED


def test_a_crowd_of_thousands_is_settled_without_each_looking_at_each() -> None:
    crowd = [job(RETRY, job_id=n, token=n) for n in range(20_000)]
    together = in_company(grounds(Detector.LEASE), crowd)
    begun_s = time.process_time()
    endings = [ended(settle(one, together)) for one in crowd]
    assert time.process_time() - begun_s < 6.0
    for place, first in ((0, 1), (500, 0)):
        autopsy = endings[place].autopsy
        assert autopsy is not None
        assert (autopsy.beside[0], len(autopsy.beside), autopsy.beside_count) == (first, 20, 19_999)


@pytest.mark.parametrize("policy", [Policy(), RETRY])
def test_a_lost_outcome_that_waited_for_a_lock_is_a_crash_that_says_so(policy: Policy) -> None:
    write = ended(settle(job(policy, deferred=True), grounds(cleared=True, entered=frozenset({7}))))
    assert write.counter == "crash"
    assert write.state is (JobState.PENDING if policy is RETRY else JobState.FAILED)
    assert write.error is not None
    assert "its code had ended before that" in (write.error.cause or "")
