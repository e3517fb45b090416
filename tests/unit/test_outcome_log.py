"""The lines of a worker's log about attempts that did not succeed."""

from typing import Any

import pytest

from unstuck.domain.endings import Attempt, Cancelled, Died, NotStorable, Outcome, Overran, Raised, Suspended, conclude
from unstuck.domain.policy import Policy
from unstuck.domain.retry import RetryRule
from unstuck.ledger.contract.workers import Claimed
from unstuck.worker.outcome_log import MAX_LINES, PERIOD_S, OutcomeLog

RETRY = Policy(retry=RetryRule(max_attempts=3))
BAD = Raised("ValueError", "bad 1", "Traceback …")
DEAD = Died("killed by SIGSEGV (signal 11)")


def job(job_id: int = 7, task: str = "boom") -> Claimed:
    return Claimed(job_id, 70 + job_id, task, "default", True, b"", "json", b"", 0, 0, 1)


def ending(outcome: Outcome, policy: Policy | None = None, **facts: Any) -> Any:
    return conclude(Attempt(7, 77, policy or Policy(), facts.get("failures", 0), facts.get("crashes", 0)), outcome)


@pytest.mark.parametrize(
    ("outcome", "policy", "level", "message", "error"),
    [
        (BAD, Policy(), "ERROR", "Job failed", "ValueError: bad 1"),
        (BAD, RETRY, "WARNING", "Job failed and is tried again", "ValueError: bad 1"),
        (Raised("E", "a\n\x1b[31mb\u202e", ""), Policy(), "ERROR", "Job failed", "E: a [31mb"),
        (NotStorable("too big"), Policy(), "ERROR", "Job failed", "RESULT_NOT_STORABLE: too big"),
        (Overran("ran for 5s"), Policy(), "ERROR", "Job failed", "DEADLINE_EXCEEDED: ran for 5s"),
        (Cancelled("by ada"), Policy(), "INFO", "Job was cancelled", "CANCELLED: by ada"),
    ],
)
def test_a_bad_end_is_a_line_with_the_job_and_the_error(
    outcome: Outcome, policy: Policy, level: str, message: str, error: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    OutcomeLog().ended(job(), ending(outcome, policy), 0.0)
    [record] = caplog.records
    assert (record.levelname, record.getMessage()) == (level, message)
    facts = vars(record)
    assert (facts["job_id"], facts["task"], facts["attempt"], facts["error"]) == (7, "boom", 1, error)
    assert ("again_in" in facts) == (level == "WARNING")


@pytest.mark.parametrize(
    ("policy", "crashes", "level", "fate"),
    [
        (Policy(), 0, "ERROR", "its job failed"),
        (Policy(on_crash="retry"), 0, "WARNING", "its job is tried again"),
        (Policy(on_crash="retry"), 3, "ERROR", "its job is quarantined, because that happened too often"),
    ],
)
def test_the_death_of_a_runner_is_not_called_the_death_of_its_worker(
    policy: Policy, crashes: int, level: str, fate: str, caplog: pytest.LogCaptureFixture
) -> None:
    written = ending(DEAD, policy, crashes=crashes)
    OutcomeLog().runner_died(job(), written, DEAD.cause, 4711, 0.0)
    [record] = caplog.records
    assert (record.levelname, record.getMessage()) == (level, f"Runner process died; {fate}")
    assert (vars(record)["cause"], vars(record)["pid"]) == (DEAD.cause, 4711)
    assert "Worker died" in written.error.message or crashes, "on the job the words stay as they were"


def test_a_job_that_sleeps_is_no_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    OutcomeLog().ended(job(), ending(Suspended(5.0)), 0.0)
    assert caplog.records == []


def test_a_task_that_fails_all_the_time_is_counted_and_hides_no_other(caplog: pytest.LogCaptureFixture) -> None:
    log = OutcomeLog()
    for number in range(1_000):
        log.ended(job(number), ending(Raised("ValueError", f"bad {number}", "")), 0.0)
    log.ended(job(5_000, "other"), ending(BAD), 1.0)
    log.ended(job(5_001), ending(Raised("KeyError", "k", "")), 1.0)
    said = [record.getMessage() for record in caplog.records]
    assert said == ["Job failed"] * (MAX_LINES + 2)
    log.tend(PERIOD_S - 1)
    assert len(caplog.records) == len(said)
    log.tend(PERIOD_S)
    summary = vars(caplog.records[-1])
    assert caplog.records[-1].getMessage() == "More attempts ended badly in the same way"
    assert (summary["attempts"], summary["task"], summary["error"]) == (1_000 - MAX_LINES, "boom", "ValueError")
    log.ended(job(6_000), ending(BAD), PERIOD_S + 1)
    assert vars(caplog.records[-1])["job_id"] == 6_000, "a new period begins"
