"""Count what becomes of jobs in the hands of foreign workers, as Python's own workers do."""

import time
from collections.abc import Collection, Iterable, Mapping

from unstuck.domain.endings import Ending
from unstuck.domain.states import JobState
from unstuck.http.foreign.handed import HandedJob
from unstuck.metrics.catalogue import JOB_RETRIES, JOB_RUN, JOB_WAIT
from unstuck.metrics.endings import count_ended
from unstuck.metrics.tallies import Tallies
from unstuck.store.records import Claimed, HeldJob

Key = tuple[int, int]


def count_claimed(tallies: Tallies, jobs: Iterable[Claimed]) -> None:
    for job in jobs:
        tallies.observe(JOB_WAIT, job.waited_s, (job.queue, job.task))


def count_succeeded(tallies: Tallies, jobs: Iterable[HandedJob]) -> None:
    """Count plain successes of jobs that were handed out here."""
    now_s = time.monotonic()
    for job in jobs:
        tallies.observe(JOB_RUN, now_s - job.since_s, (job.queue, job.task))
        count_ended(tallies, job.queue, job.task, JobState.SUCCEEDED)


def count_settled(
    tallies: Tallies,
    held: Mapping[Key, HeldJob],
    endings: Mapping[Key, Ending],
    keys: Iterable[Key],
    lost: Collection[Key],
) -> None:
    """Count what was written."""
    for key in keys:
        if key in lost:
            continue
        job, ending = held[key], endings.get(key)
        state = JobState.SUCCEEDED if ending is None else ending.state
        tallies.observe(JOB_RUN, job.running_s, (job.queue, job.task))
        if state not in (JobState.PENDING, JobState.WAITING):
            count_ended(tallies, job.queue, job.task, state)
        elif ending is not None and ending.error is not None:
            tallies.add(JOB_RETRIES, (job.queue, ending.error.code))
