"""Every way an attempt can end, under every policy: the job's next state is legal and its counters are right."""

from typing import Literal

import hypothesis.strategies as st
import pytest
from hypothesis import given

from unstuck.domain.autopsy import Autopsy, DeathKind, ProgressMark, encode_autopsy
from unstuck.domain.endings import Ending
from unstuck.domain.errors import WORKER_DIED, ErrorCode
from unstuck.domain.health import IN_A_ROW
from unstuck.domain.liveness import Detector
from unstuck.domain.outcomes import Cancelled, Died, NotStorable, Outcome, Overran, Raised, Stalled, Succeeded
from unstuck.domain.policy import Policy, decode_policy
from unstuck.domain.recovery import MAX_EXCUSES, MAX_SUSPICIONS, Attempt, conclude, printable
from unstuck.domain.retry import CRASH_BACKOFF_MAX_S, RetryRule
from unstuck.domain.states import FINAL, AttemptState, JobState, may_move

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
    suspicions=st.integers(0, 5),
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
    assert ending.state is JobState.PENDING or ending.state in FINAL
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
        assert attempt.suspicions < MAX_SUSPICIONS
    elif counter == "crash":
        assert death.shared is None or attempt.suspicions >= MAX_SUSPICIONS


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
    attempt = Attempt(1, 1, Policy(on_crash="retry"), 0, crashes=1, suspicions=MAX_SUSPICIONS)
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
    failures = crashes = suspicions = 0
    endings: list[Ending] = []
    while not endings or endings[-1].state is JobState.PENDING:
        assert len(endings) < 100
        ending = conclude(Attempt(1, len(endings) + 1, policy, failures, crashes, False, suspicions), outcome)
        failures += ending.counter == "failure"
        crashes += ending.counter == "crash"
        suspicions += ending.counter in ("suspicion", "company")
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
    shown = printable(text, limit)
    assert storable(shown)
    if len(text) <= limit and storable(text):
        assert shown == text


@pytest.mark.parametrize("stored", [b'{"on_crash":"phone home"}', b"{", b"[]", b"\xff", b'{"timeout_s":"long"}'])
def test_rules_written_by_an_unknown_version_are_read_as_the_careful_default(stored: bytes) -> None:
    assert decode_policy(stored) == Policy()
    assert decode_policy(b'{"on_crash":"retry","a_later_rule":1}').on_crash == "retry"
