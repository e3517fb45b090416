"""Check that what the ledger tells of a job is a story that could legally have happened."""

import itertools
from collections import Counter

from unstuck.domain.states import FINAL_STATES, AttemptState, JobState
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.jobs import AttemptRecord, JobRecord

ENDED = {state for state in AttemptState if state not in (AttemptState.CLAIMED, AttemptState.RUNNING)}


def check_history(
    ledger: Ledger, job_ids: list[int], max_crash_retries: int = 3, *, clock_was_set: bool = False
) -> Counter[str]:
    """Raise AssertionError at the first illegal story; give the number of jobs by state.

    If the clock of the ledger was set meanwhile, the order of its times proves nothing and is not checked."""
    seen_tokens: dict[int, int] = {}
    states: Counter[str] = Counter()
    for job_id in job_ids:
        job = ledger.jobs.get(job_id)
        assert job is not None, f"job {job_id} is lost"
        attempts = ledger.jobs.attempts(job_id)
        for attempt in attempts:
            owner = seen_tokens.setdefault(attempt.token, job_id)
            assert owner == job_id, f"token {attempt.token} was given to jobs {owner} and {job_id}"
        _check_job(job, attempts, max_crash_retries)
        if not clock_was_set:
            _check_times(attempts, _story(job, attempts))
        states[job.state.value] += 1
    return states


def _check_job(job: JobRecord, attempts: list[AttemptRecord], max_crash_retries: int) -> None:
    story = _story(job, attempts)
    assert job.state in FINAL_STATES, f"did not end: {story}"
    assert job.finished_at is not None, story
    tokens = [attempt.token for attempt in attempts]
    assert len(set(tokens)) == len(tokens), f"a token twice: {story}"
    assert all(attempt.state in ENDED for attempt in attempts), f"an attempt is still open: {story}"
    successes = [attempt for attempt in attempts if attempt.state is AttemptState.SUCCEEDED]
    if job.state is JobState.SUCCEEDED:
        assert len(successes) == 1, f"{len(successes)} successes: {story}"
        assert attempts[-1] is successes[0], f"went on after its success: {story}"
        assert job.error is None, f"succeeded with an error: {story}"
        assert job.result is not None, f"succeeded without a result: {story}"
    else:
        assert not successes, f"a success was overruled: {story}"
        assert job.error is not None, f"ended badly without saying why: {story}"
    crashed = sum(attempt.state is AttemptState.CRASHED for attempt in attempts)
    assert job.crash_count <= crashed, f"more crashes counted ({job.crash_count}) than happened: {story}"
    assert job.crash_count <= max_crash_retries + 1, f"tried on after the last crash retry: {story}"


def _check_times(attempts: list[AttemptRecord], story: str) -> None:
    # By time, not by token: those are unique, and each session of a server has some in stock.
    claimed = [attempt.claimed_at for attempt in attempts if attempt.claimed_at is not None]
    assert claimed == sorted(claimed), f"attempts out of order: {story}"
    for before, after in itertools.pairwise(attempts):
        if before.ended_at is not None and after.started_at is not None:
            # The ledger gives a job away only after it closed the attempt before.
            assert after.started_at >= before.ended_at - 0.001, f"attempts overlap in the ledger: {story}"
    for attempt in attempts:
        if attempt.started_at is not None and attempt.ended_at is not None:
            assert attempt.ended_at >= attempt.started_at - 0.001, f"ended before it began: {story}"


def _story(job: JobRecord, attempts: list[AttemptRecord]) -> str:
    return f"job {job.id} ({job.state}): {[(a.token, a.state.value, a.cause) for a in attempts]}"
