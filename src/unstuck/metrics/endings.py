"""Count jobs that reached a final state, by queue and by task."""

from unstuck.domain.states import JobState
from unstuck.metrics.catalogue import JOBS_ENDED, TASK_ENDED
from unstuck.metrics.counters import Counters

_OUTCOMES = {JobState.SUCCEEDED: "succeeded", JobState.FAILED: "failed", JobState.QUARANTINED: "failed"}


def count_ended(counters: Counters, queue: str, task: str, state: JobState, by: int = 1) -> None:
    counters.add(JOBS_ENDED, (queue, state.value), by)
    if outcome := _OUTCOMES.get(state):
        counters.add(TASK_ENDED, (task, outcome), by)
