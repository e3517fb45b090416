"""Every way an attempt can end, under every policy: the job's next state is legal and its counters are right."""

import time
from typing import Any, Literal

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from unstuck.domain.autopsy import Autopsy, DeathKind, ProgressMark, encode_autopsy
from unstuck.domain.endings import (
    MAX_EXCUSES,
    MAX_SUSPICIONS,
    Attempt,
    Cancelled,
    Died,
    Ending,
    NotStorable,
    Outcome,
    Overran,
    Raised,
    Release,
    Stalled,
    Succeeded,
    conclude,
    storable_text,
)
from unstuck.domain.liveness import KERNEL, Detector, Session
from unstuck.domain.policy import Policy, decode_policy, encode_policy
from unstuck.domain.recovery_rules import RecoveryRules
from unstuck.domain.retry import CRASH_BACKOFF_MAX_S, RetryRule
from unstuck.domain.states import FINAL_STATES, AttemptState, JobState, WorkerState, may_move
from unstuck.domain.worker_health import IN_A_ROW
from unstuck.errors import WORKER_DIED, ErrorCode
from unstuck.ledger.contract.recovery import WorkerWatch
from unstuck.ledger.contract.workers import HeldRecord
from unstuck.recovery.decide import WorkerDeath, ending_of, is_left_to_operator, is_stale, overrun, ran_together

# Anything a process can print or die of: NUL and lone surrogates too.
words = st.text(st.characters(codec=None), max_size=40)
rules = st.builds(
    RetryRule,
    max_attempts=st.integers(1, 6),
    backoff=st.sampled_from(["exponential", "linear", "constant"]),
    delay_s=st.floats(0, 100),
    max_delay_s=st.floats(0, 1000),
)
policies = st.builds(
    Policy,
    retry=rules,
    on_crash=st.sampled_from(["fail", "retry"]),
    max_crash_retries=st.integers(0, 5),
    overlap=st.sampled_from(["bounded", "never"]),
)
attempts = st.builds(
    Attempt,
    job_id=st.integers(1),
    token=st.integers(1),
    policy=policies,
    failures=st.integers(0, 8),
    crashes=st.integers(0, 8),
    cancel_requested=st.booleans(),
    suspected_crashes=st.integers(0, 5),
)
autopsies = st.none() | st.builds(
    Autopsy,
    kind=st.sampled_from(DeathKind),
    summary=words,
    detector=st.sampled_from(Detector),
    doubt=words,
    stack=words,
    stdout=words,
    stderr=words,
    progress=st.none() | st.builds(ProgressMark, done=st.just(1.0), message=words),
)
deaths = st.builds(
    Died,
    cause=words,
    code=st.sampled_from([ErrorCode.WORKER_CRASHED, ErrorCode.OUT_OF_MEMORY]),
    counts=st.booleans(),
    drained=st.booleans(),
    shared=st.sampled_from([None, "process", "worker"]),
    autopsy=autopsies,
)
outcomes: st.SearchStrategy[Outcome] = st.one_of(
    st.builds(Succeeded, result=st.binary(max_size=10)),
    st.builds(Raised, type=words, message=words, traceback=words),
    st.builds(NotStorable, reason=words),
    deaths,
    st.builds(Overran, cause=words, autopsy=autopsies),
    st.builds(Stalled, cause=words, autopsy=autopsies),
    st.builds(Cancelled, cause=words, autopsy=autopsies),
)


def storable(text: str | None) -> bool:
    try:
        return text is None or ("\0" not in text and text.encode("utf-8").decode("utf-8") == text)
    except UnicodeEncodeError:
        return False


@given(attempts, outcomes)
def test_every_outcome_under_every_policy_is_a_legal_move(attempt: Attempt, outcome: Outcome) -> None:
    ending = conclude(attempt, outcome)
    assert (ending.job_id, ending.token) == (attempt.job_id, attempt.token)
    assert may_move(JobState.RUNNING, ending.state)
    assert ending.state is JobState.PENDING or ending.state in FINAL_STATES
    assert ending.attempt not in (AttemptState.CLAIMED, AttemptState.RUNNING)
    assert (ending.error is None) == (ending.state is JobState.SUCCEEDED)
    assert (ending.result is not None) == (ending.state is JobState.SUCCEEDED)
    assert ending.delay_s == 0 or ending.state is JobState.PENDING
    assert ending.delay_s >= 0


@given(attempts, outcomes)
def test_everything_written_down_can_be_stored_in_any_database(attempt: Attempt, outcome: Outcome) -> None:
    ending = conclude(attempt, outcome)
    assert storable(ending.message)
    assert len(ending.message) <= 500
    if ending.error is not None:
        assert storable(ending.error.message)
        assert storable(ending.error.cause)
        assert all(storable(str(value)) for value in ending.error.details.values())
    if ending.autopsy is not None:
        text = encode_autopsy(ending.autopsy)
        assert storable(text)
        assert "\\u0000" not in text


@given(attempts, deaths)
def test_a_death_spends_the_crash_counter_and_never_the_retries(attempt: Attempt, death: Died) -> None:
    ending = conclude(attempt, death)
    cancelled = attempt.cancel_requested
    counted = death.counts and not death.drained and not cancelled
    assert ending.counter in (("crash", "suspicion", "company") if counted else ("none",))


@given(attempts, deaths)
def test_a_death_in_company_counts_only_when_company_is_no_excuse_any_more(attempt: Attempt, death: Died) -> None:
    counter = conclude(attempt, death).counter
    if counter in ("suspicion", "company"):
        assert death.shared == ("process" if counter == "suspicion" else "worker")
        assert attempt.suspected_crashes < MAX_SUSPICIONS
    elif counter == "crash":
        assert death.shared is None or attempt.suspected_crashes >= MAX_SUSPICIONS


@pytest.mark.parametrize("shared", ["process", "worker"])
def test_a_job_that_always_dies_in_company_is_quarantined_too(shared: Literal["process", "worker"]) -> None:
    endings = live_through(Policy(on_crash="retry"), Died("the host went down", shared=shared))
    assert len(endings) == MAX_SUSPICIONS + 3 + 1
    assert endings[-1].state is JobState.QUARANTINED


def test_a_crash_on_a_worker_under_which_everything_dies_is_charged_once_and_then_excused_for_most_of_a_day() -> None:
    everything_dies = Died("SIGKILL", in_a_row=7, autopsy=Autopsy(DeathKind.SIGNAL, "SIGKILL", Detector.RUNNER))
    endings = live_through(Policy(on_crash="retry"), everything_dies)
    assert [ending.counter for ending in endings] == ["crash", *["company"] * MAX_EXCUSES, *["crash"] * 3]
    assert endings[-1].state is JobState.QUARANTINED
    waits = [ending.delay_s for ending in endings[1 : MAX_EXCUSES + 1]]
    assert waits == sorted(waits)
    assert 18 * 3600 < sum(waits) < 24 * 3600
    rule = endings[1].autopsy.rule if endings[1].autopsy is not None else ""
    assert rule.startswith("the last 7 different jobs on its worker all died, so this crash is the worker's")


@pytest.mark.parametrize("shared", ["process", "worker"])
def test_company_is_no_reason_to_charge_a_job_on_a_worker_under_which_everything_dies(
    shared: Literal["process", "worker"],
) -> None:
    attempt = Attempt(1, 1, Policy(on_crash="retry"), 0, crashes=1, suspected_crashes=MAX_SUSPICIONS)
    assert conclude(attempt, Died("SIGKILL", shared=shared, in_a_row=IN_A_ROW)).counter == "company"
    assert conclude(attempt, Died("SIGKILL", shared=shared)).counter == "crash"


def test_two_jobs_that_die_by_turns_are_excused_for_a_while_and_then_quarantined() -> None:
    endings = live_through(Policy(on_crash="retry"), Died("SIGKILL", in_a_row=2, died_here=1))
    assert [ending.counter for ending in endings] == ["crash", *["company"] * MAX_SUSPICIONS, *["crash"] * 3]
    # Others go first: one of them may show that it is the worker.
    assert all(ending.delay_s >= 1.0 for ending in endings[:-1])


def test_the_only_job_that_dies_on_a_worker_is_quarantined_at_its_fourth_death_and_lets_others_go_first() -> None:
    first = conclude(Attempt(1, 1, Policy(on_crash="retry"), 0, crashes=0), Died("SIGKILL", in_a_row=1))
    assert first.delay_s < 0.5
    endings = live_through(Policy(on_crash="retry"), Died("SIGKILL", in_a_row=1, died_here=1))
    assert [ending.counter for ending in endings] == ["crash"] * 4
    assert endings[1].delay_s >= 1.0
    assert endings[-1].state is JobState.QUARANTINED


def test_a_job_whose_first_crash_was_elsewhere_is_charged_by_the_first_two_deaths_in_a_row() -> None:
    attempt = Attempt(1, 1, Policy(on_crash="retry"), 0, crashes=1)
    assert conclude(attempt, Died("SIGKILL", in_a_row=2)).counter == "crash"


@given(attempts, outcomes)
def test_every_autopsy_says_which_rule_was_applied(attempt: Attempt, outcome: Outcome) -> None:
    given_one = getattr(outcome, "autopsy", None)
    ending = conclude(attempt, outcome)
    assert (ending.autopsy is None) == (given_one is None)
    assert ending.autopsy is None or ending.autopsy.rule


@given(attempts, st.builds(Died, cause=words, drained=st.just(True), counts=st.booleans()))
def test_a_drain_counts_for_nobody_and_never_quarantines(attempt: Attempt, drain: Died) -> None:
    ending = conclude(attempt, drain)
    assert ending.counter == "none"
    assert ending.state is not JobState.QUARANTINED
    if not attempt.cancel_requested:
        assert ending.attempt is AttemptState.DRAINED
        assert ending.state is (JobState.PENDING if attempt.policy.on_crash == "retry" else JobState.FAILED)
    assert ending.delay_s == 0


@given(attempts, outcomes)
def test_a_cancelled_job_is_never_tried_again(attempt: Attempt, outcome: Outcome) -> None:
    ending = conclude(attempt, outcome)
    if attempt.cancel_requested:
        assert ending.state is not JobState.PENDING
        if isinstance(outcome, Died | Raised | Overran | Stalled | Cancelled):
            assert ending.state is JobState.CANCELLED
            assert ending.counter == "none"


@given(attempts, deaths)
def test_on_crash_fail_fails_at_the_first_death_in_the_words_of_the_table(attempt: Attempt, death: Died) -> None:
    if attempt.policy.on_crash != "fail" or attempt.cancel_requested:
        return
    ending = conclude(attempt, death)
    assert ending.state is JobState.FAILED
    assert ending.error is not None
    assert ending.error.message == WORKER_DIED == "Worker died unexpectedly"
    assert ending.error.code == death.code


def live_through(policy: Policy, outcome: Outcome) -> list[Ending]:
    """Try until the job is finished, with the counters kept as the ledger keeps them."""
    failures = crashes = suspected_crashes = 0
    endings: list[Ending] = []
    while not endings or endings[-1].state is JobState.PENDING:
        assert len(endings) < 100
        ending = conclude(Attempt(1, len(endings) + 1, policy, failures, crashes, False, suspected_crashes), outcome)
        failures += ending.counter == "failure"
        crashes += ending.counter == "crash"
        suspected_crashes += ending.counter in ("suspicion", "company")
        endings.append(ending)
    return endings


def test_by_default_the_fourth_death_quarantines() -> None:
    endings = live_through(Policy(on_crash="retry"), Died("segfault"))
    assert [ending.state for ending in endings] == [JobState.PENDING] * 3 + [JobState.QUARANTINED]
    assert endings[-1].error is not None
    assert endings[-1].error.code == ErrorCode.CRASHED_TOO_OFTEN
    assert "4 times" in endings[-1].error.message


@given(st.integers(0, 20))
def test_quarantine_comes_exactly_after_the_allowed_crash_retries(allowed: int) -> None:
    endings = live_through(Policy(on_crash="retry", max_crash_retries=allowed), Died("segfault"))
    assert len(endings) == allowed + 1
    assert endings[-1].state is JobState.QUARANTINED
    waits_s = [ending.delay_s for ending in endings[:-1]]
    assert waits_s == sorted(waits_s)
    assert all(0 < wait_s <= CRASH_BACKOFF_MAX_S for wait_s in waits_s)


@given(st.integers(1, 20), st.sampled_from([Raised("E", "m", "t"), Overran("late"), Stalled("mute")]))
def test_user_errors_and_deadlines_are_tried_exactly_as_often_as_asked(most: int, outcome: Outcome) -> None:
    endings = live_through(Policy(retry=RetryRule(max_attempts=most)), outcome)
    assert len(endings) == most
    assert endings[-1].state is JobState.FAILED
    assert {ending.counter for ending in endings} == {"failure"}


@given(attempts)
def test_a_result_that_cannot_be_stored_is_not_tried_again(attempt: Attempt) -> None:
    ending = conclude(attempt, NotStorable("NaN"))
    assert ending.state is JobState.FAILED
    assert ending.error is not None
    assert ending.error.code == ErrorCode.RESULT_NOT_STORABLE


@given(words, st.integers(2, 60))
def test_printable_text_is_bounded_and_storable(text: str, limit: int) -> None:
    shown = storable_text(text, limit)
    assert storable(shown)
    if len(text) <= limit and storable(text):
        assert shown == text


@pytest.mark.parametrize("stored", [b'{"on_crash":"phone home"}', b"{", b"[]", b"\xff", b'{"timeout_s":"long"}'])
def test_rules_written_by_an_unknown_version_are_read_as_the_careful_default(stored: bytes) -> None:
    assert decode_policy(stored) == Policy()
    assert decode_policy(b'{"on_crash":"retry","a_later_rule":1}').on_crash == "retry"


def job(policy: Policy | None = None, **changes: Any) -> HeldRecord:
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
    return HeldRecord(**{**facts, **changes})


def grounds(detector: Detector | None = Detector.PEER, **changes: Any) -> WorkerDeath:
    return WorkerDeath(
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
    write = ending_of(job(state=JobState.CLAIMED), grounds(detector))
    assert write == Release(1, 7, "requeued", "Task re-queued due to stale worker: w123")


def test_a_running_job_fails_with_the_cause_and_who_saw_it() -> None:
    ending = ended(ending_of(job(), grounds()))
    assert ending.state is JobState.FAILED
    assert ending.error is not None
    assert ending.error.message == "Worker died unexpectedly"
    assert ending.error.cause == "worker w123 on host h: its process no longer exists (neighbour)"


def test_a_running_job_that_may_be_retried_says_so_in_its_event() -> None:
    ending = ended(ending_of(job(RETRY), grounds()))
    assert (ending.state, ending.event, ending.counter) == (JobState.PENDING, "requeued", "crash")
    assert ending.message.startswith("Task re-queued due to stale worker: w123 (worker w123 on host h: ")


def test_a_job_whose_code_never_began_returns_for_free_where_that_is_proven() -> None:
    certain = grounds(cleared=True, entered=frozenset({8}))
    assert isinstance(ending_of(job(), certain), Release)
    assert isinstance(ending_of(job(token=8), certain), Ending)


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
def test_without_proof_every_running_job_counts_as_begun(unsure: WorkerDeath) -> None:
    assert isinstance(ending_of(job(), unsure), Ending)


def test_a_cancelled_job_whose_code_never_began_is_cancelled_and_not_queued_again() -> None:
    ending = ended(ending_of(job(cancel_requested=True), grounds(cleared=True, entered=frozenset())))
    assert ending.state is JobState.CANCELLED


def test_what_a_stopped_worker_left_behind_counts_for_nobody() -> None:
    ending = ended(ending_of(job(RETRY, crashes=99), grounds(None, evidence="it stopped")))
    assert (ending.state, ending.counter) == (JobState.PENDING, "none")
    assert "(drain)" in ending.message


@pytest.mark.parametrize("detector", [Detector.SESSION, Detector.LEASE, Detector.OPERATOR, Detector.PEER])
def test_a_job_that_must_never_overlap_waits_for_the_end_of_the_lease(detector: Detector) -> None:
    assert ended(ending_of(job(NEVER, silent_s=4.0), grounds(detector))).delay_s >= 26.0
    assert ended(ending_of(job(RETRY, silent_s=4.0), grounds(detector))).delay_s < 1.0


@pytest.mark.parametrize("detector", sorted(KERNEL))
def test_proof_of_death_ends_that_wait(detector: Detector) -> None:
    assert ended(ending_of(job(NEVER), grounds(detector, cleared=True))).delay_s < 1.0


def test_a_job_without_heartbeat_that_must_never_overlap_waits_for_its_deadline() -> None:
    held = job(NEVER, heartbeat_timeout_s=None, timeout_s=100.0, running_s=40.0)
    assert ended(ending_of(held, grounds(Detector.SESSION))).delay_s == pytest.approx(60.0)


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
        assert is_left_to_operator(job(), detector, off) == silent
        assert is_left_to_operator(job(state=JobState.CLAIMED), detector, off) == silent
        assert not is_left_to_operator(job(), detector, RecoveryRules())
    half = RecoveryRules(auto_fail_stale_running=False)
    assert not is_left_to_operator(job(state=JobState.CLAIMED), Detector.LEASE, half)
    assert is_left_to_operator(job(), Detector.LEASE, half)


def test_a_job_that_its_own_app_reserved_for_an_operator_is_left_whoever_holds_it() -> None:
    reserved = Policy(auto_fail_stale_running=False)
    assert is_left_to_operator(job(reserved), Detector.LEASE, RecoveryRules())
    assert not is_left_to_operator(job(reserved, state=JobState.CLAIMED), Detector.LEASE, RecoveryRules())
    assert not is_left_to_operator(job(reserved), Detector.PEER, RecoveryRules())


def test_a_policy_nobody_understands_still_lets_the_job_end() -> None:
    ending = ended(ending_of(msgspec.structs.replace(job(), policy=b"\xff not json"), grounds()))
    assert ending.state is JobState.FAILED


def test_a_crowd_of_thousands_is_settled_without_each_looking_at_each() -> None:
    crowd = [job(RETRY, job_id=n, token=n) for n in range(20_000)]
    together = ran_together(grounds(Detector.LEASE), crowd)
    begun_s = time.process_time()
    endings = [ended(ending_of(one, together)) for one in crowd]
    assert time.process_time() - begun_s < 6.0
    for place, first in ((0, 1), (500, 0)):
        autopsy = endings[place].autopsy
        assert autopsy is not None
        assert (autopsy.beside[0], len(autopsy.beside), autopsy.beside_count) == (first, 20, 19_999)


@pytest.mark.parametrize("policy", [Policy(), RETRY])
def test_a_lost_outcome_that_waited_for_a_lock_is_a_crash_that_says_so(policy: Policy) -> None:
    write = ended(ending_of(job(policy, deferred=True), grounds(cleared=True, entered=frozenset({7}))))
    assert write.counter == "crash"
    assert write.state is (JobState.PENDING if policy is RETRY else JobState.FAILED)
    assert write.error is not None
    assert "its code had ended before that" in (write.error.cause or "")
