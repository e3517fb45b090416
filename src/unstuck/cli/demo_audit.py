"""Compare what the ledger says of the demo's jobs with what the jobs themselves wrote down elsewhere."""

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from unstuck.cli.demo_record import Tries, read_record
from unstuck.domain.errors import ErrorCode
from unstuck.domain.payload import decode
from unstuck.domain.states import FINAL, AttemptState, JobState
from unstuck.store.contract import Ledger
from unstuck.store.records import JobFilter, JobRecord

PAGE = 1_000
OUTCOMES_BATCH = 500
BY_DESIGN = {("parse", ErrorCode.TASK_FAILED), ("charge", ErrorCode.WORKER_CRASHED)}
"""What may fail, and how: bad input, and work that must not be repeated after a crash."""


@dataclass
class Audit:
    enqueued: int = 0
    succeeded: int = 0
    raised_by_design: int = 0
    crashed_by_design: int = 0
    lost: dict[int, str] = field(default_factory=dict)
    """Job id → what is wrong with it."""
    twice: dict[int, str] = field(default_factory=dict)
    retried_after_error: int = 0
    rerun_after_crash: int = 0
    """Tries that were made because the one before was killed."""
    jobs_rerun: int = 0
    ran_to_the_end_again: int = 0
    """Killed between their last line and the ledger's commit: side effects happened twice, the success once."""


def audit(ledger: Ledger, ids: Collection[int], record: Path) -> Audit:
    """Check every job of the demo, one by one."""
    result = Audit(enqueued=len(ids))
    jobs = _read_jobs(ledger, ids)
    tries = read_record(record)
    results = _read_results(ledger, ids)
    for job_id in ids:
        job = jobs.get(job_id)
        if job is None:
            result.lost[job_id] = "is not in the ledger"
        elif job.state not in FINAL:
            result.lost[job_id] = f"{job.task} is still {job.state}"
        else:
            _check(ledger, job, tries[job_id], results.get(job_id), result)
    return result


def _check(ledger: Ledger, job: JobRecord, tries: Tries, mark: str | None, result: Audit) -> None:
    result.retried_after_error += max(0, job.failures - (job.state is JobState.FAILED))
    # Those that were lost with a whole worker are counted as suspicions: whose doing it was is not known.
    deaths = job.crash_count + job.suspicions
    if deaths and job.state is JobState.SUCCEEDED:
        result.rerun_after_crash += deaths
        result.jobs_rerun += 1
    if job.state is not JobState.SUCCEEDED:
        code = job.error.code if job.error else ""
        if (job.task, code) not in BY_DESIGN or job.state is not JobState.FAILED:
            result.lost[job.id] = f"{job.task} ended as {job.state} ({code}), which its rules do not allow"
        elif code == ErrorCode.TASK_FAILED:
            result.raised_by_design += 1
        else:
            result.crashed_by_design += 1
        return
    result.succeeded += 1
    if mark not in tries.ended:
        result.lost[job.id] = f"{job.task} is a success in the ledger, and never ran to its end"
        return
    result.ran_to_the_end_again += len(tries.ended) > 1
    if wrong := _second_success(ledger, job, tries, mark):
        result.twice[job.id] = wrong


def _second_success(ledger: Ledger, job: JobRecord, tries: Tries, mark: str) -> str | None:
    """Find signs of a job that was finished, and then given out or finished again."""
    # Both times are from the same host: once the try that counts has ended, nobody else can have the job.
    if any(at > tries.ended[mark] for at in tries.begun.values()):
        return f"{job.task} was begun again after its success"
    if len(tries.begun) == 1:
        return None
    attempts = ledger.attempts(job.id)
    successes = sum(attempt.state is AttemptState.SUCCEEDED for attempt in attempts)
    if successes != 1:
        return f"{job.task} has {successes} successful attempts"
    crashed = sum(attempt.state in (AttemptState.CRASHED, AttemptState.DRAINED) for attempt in attempts)
    if len(tries.ended) - 1 > crashed:
        return f"{job.task} ran to its end {len(tries.ended)} times, with {crashed} crashes to explain it"
    return None


def _read_jobs(ledger: Ledger, ids: Collection[int]) -> dict[int, JobRecord]:
    wanted = set(ids)
    found: dict[int, JobRecord] = {}
    before = max(wanted, default=0) + 1
    while wanted and before > min(wanted):
        page = ledger.jobs(JobFilter(before_id=before, limit=PAGE))
        if not page:
            break
        found.update({job.id: job for job in page if job.id in wanted})
        before = page[-1].id
    return found


def _read_results(ledger: Ledger, ids: Collection[int]) -> dict[int, str]:
    found: dict[int, str] = {}
    ordered = list(ids)
    for at in range(0, len(ordered), OUTCOMES_BATCH):
        for outcome in ledger.outcomes(ordered[at : at + OUTCOMES_BATCH]):
            if outcome.state is JobState.SUCCEEDED:
                found[outcome.job_id] = str(decode(outcome.result))
    return found
