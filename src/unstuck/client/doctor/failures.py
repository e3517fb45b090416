"""Find tasks and schedules whose jobs fail."""

import shlex
from collections.abc import Iterator

from unstuck.client.doctor.facts import Facts, Thresholds
from unstuck.client.doctor.findings import Finding, problem, warning
from unstuck.domain.conditions import Code
from unstuck.domain.failure_rates import FailingTask
from unstuck.ledger.contract.diagnosis import Diagnosis
from unstuck.notify.failures import Example, FailingSchedule

MAX_TASKS = 5
MOST = 0.5
"""A task of whose jobs this share failed is a problem. From which share on it is worth a word is a setting."""


def check_failing(facts: Facts, _diagnosis: Diagnosis, _limits: Thresholds) -> Iterator[Finding]:
    for one in facts.failures.tasks[:MAX_TASKS]:
        yield _task(one, facts.failures.examples.get(one.task))
    for schedule in facts.failures.schedules:
        yield _schedule(schedule)


def _task(one: FailingTask, example: Example | None) -> Finding:
    say = problem if one.ends.share >= MOST else warning
    cure = f"`unstuck jobs --state failed --task {shlex.quote(one.task)}` lists them."
    if example is not None:
        cure = (
            f"`unstuck why {example.job_id}` tells what happened. When the cause is mended, `unstuck retry --task "
            f"{shlex.quote(one.task)}` runs them again."
        )
    return say(
        Code.TASK_FAILING,
        str(one),
        _lately(example),
        cure,
        task=one.task,
        failed=one.ends.failed,
        ended=one.ends.ended,
        within_s=one.within_s,
        example=None if example is None else example.job_id,
    )


def _schedule(one: FailingSchedule) -> Finding:
    return problem(
        Code.SCHEDULE_FAILING,
        f"The last job of schedule {one.name!r} failed",
        _lately(one.example),
        f"`unstuck why {one.example.job_id}` tells what happened. When the cause is mended, `unstuck retry "
        f"{one.example.job_id}` runs it again.",
        schedule=one.name,
        task=one.task,
        example=one.example.job_id,
    )


def _lately(example: Example | None) -> str:
    if example is None or example.error is None:
        return "The jobs themselves are gone."
    return f"Job {example.job_id} ended with {example.error}."
