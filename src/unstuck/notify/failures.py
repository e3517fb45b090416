"""Look for tasks and schedules whose jobs fail, in a few bounded questions to the ledger."""

import time

import msgspec

from unstuck.domain.endings import JobError
from unstuck.domain.failure_rates import DAY_S, HOUR_S, Ends, FailingTask, find_failing
from unstuck.domain.states import JobState
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.jobs import JobFilter
from unstuck.ledger.contract.schedules import ScheduleRecord
from unstuck.metrics.catalogue import TASK_ENDED
from unstuck.metrics.counters import decode_labels

MAX_EXAMPLES = 5
"""How many failing tasks are looked at for an example."""
FAILED = (JobState.FAILED, JobState.QUARANTINED)


class Example(msgspec.Struct, frozen=True):
    """The newest job that failed."""

    job_id: int
    error: JobError | None


class FailingSchedule(msgspec.Struct, frozen=True):
    name: str
    task: str
    example: Example


class Failures(msgspec.Struct, frozen=True):
    tasks: tuple[FailingTask, ...] = ()
    examples: dict[str, Example] = {}
    """By task, of the worst few."""
    schedules: tuple[FailingSchedule, ...] = ()
    """Schedules whose last job failed."""
    open_schedules: frozenset[str] = frozenset()
    """Schedules whose last job has not ended: nothing new is known of them."""


NO_FAILURES = Failures()


def look_at_failures(ledger: Ledger, share: float) -> Failures:
    """Return the tasks of which at least this share of jobs failed lately, and the schedules whose last job failed."""
    tasks = tuple(find_failing(_ends(ledger, HOUR_S), _ends(ledger, DAY_S), share))
    schedules, open_schedules = _look_at_schedules(ledger)
    return Failures(tasks, _examples(ledger, tasks[:MAX_EXAMPLES]), schedules, open_schedules)


def _ends(ledger: Ledger, within_s: float) -> dict[str, Ends]:
    found: dict[str, dict[str, int]] = {}
    since_minute = int((time.time() - within_s) // 60)
    for count in ledger.admin.counter_sums(TASK_ENDED.name, since_minute):
        labels = decode_labels(count.labels)
        found.setdefault(labels["task"], {})[labels["outcome"]] = round(count.value)
    return {task: Ends(counts.get("failed", 0), counts.get("succeeded", 0)) for task, counts in found.items()}


def _examples(ledger: Ledger, tasks: tuple[FailingTask, ...]) -> dict[str, Example]:
    examples = {}
    for one in tasks:
        newest = ledger.jobs.list(JobFilter(states=FAILED, task=one.task, limit=1))
        if newest:
            examples[one.task] = Example(newest[0].id, newest[0].error)
    return examples


def _look_at_schedules(ledger: Ledger) -> tuple[tuple[FailingSchedule, ...], frozenset[str]]:
    last = {
        record.last_job_id: record for record in ledger.schedules.list() if record.last_job_id and not record.paused
    }
    ended = {outcome.job_id: outcome for outcome in ledger.jobs.outcomes(list(last))} if last else {}
    failing = tuple(
        FailingSchedule(record.name, record.task, Example(job_id, ended[job_id].error))
        for job_id, record in last.items()
        if job_id in ended and ended[job_id].state in FAILED
    )
    return failing, frozenset(_unknown(last, set(ended)))


def _unknown(last: dict[int, ScheduleRecord], ended: set[int]) -> set[str]:
    return {record.name for job_id, record in last.items() if job_id not in ended}
