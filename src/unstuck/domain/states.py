"""Name the states of jobs, attempts and workers, and say which changes are legal."""

from enum import StrEnum


class JobState(StrEnum):
    PENDING = "pending"
    CLAIMED = "claimed"
    RUNNING = "running"
    WAITING = "waiting"
    """It gave its slot back in the middle of its work, and waits for a time or a signal."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    QUARANTINED = "quarantined"


class AttemptState(StrEnum):
    """How one try at a job stands, or ended."""

    CLAIMED = "claimed"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    """User code raised, ran past its deadline, or its result could not be stored."""
    CRASHED = "crashed"
    """The process that ran it died, or was lost."""
    DRAINED = "drained"
    """Ended by a shutdown; counts for nobody."""
    CANCELLED = "cancelled"
    SUSPENDED = "suspended"
    """It gave its slot back until a time or a signal; counts for nobody."""


class Transport(StrEnum):
    """Through which door a worker comes. Only Python's own workers have a process that others may look at: whoever
    comes over a network is judged by its lease alone."""

    PYTHON = "python"
    HTTP = "http"
    MDP = "mdp"


class WorkerState(StrEnum):
    ACTIVE = "active"
    DRAINING = "draining"
    SUSPECT = "suspect"
    DEAD = "dead"
    STOPPED = "stopped"


HELD_STATES = frozenset({JobState.CLAIMED, JobState.RUNNING})
FINAL_STATES = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.QUARANTINED})
UNSUCCESSFUL_STATES = frozenset({JobState.FAILED, JobState.CANCELLED, JobState.QUARANTINED})
"""Ends that come with an error code, always."""
LIVE_STATES = frozenset({WorkerState.ACTIVE, WorkerState.DRAINING, WorkerState.SUSPECT})

JOB_TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    # Straight to RUNNING where a slot waits for the job, or where it may run ahead (`on_crash="retry"`): still
    # committed before user code runs.
    JobState.PENDING: frozenset({JobState.CLAIMED, JobState.RUNNING, JobState.CANCELLED}),
    JobState.CLAIMED: frozenset({JobState.RUNNING, JobState.PENDING, JobState.CANCELLED}),
    JobState.RUNNING: frozenset({JobState.PENDING, JobState.WAITING, *FINAL_STATES}),
    JobState.WAITING: frozenset({JobState.PENDING, JobState.CANCELLED}),
    JobState.SUCCEEDED: frozenset(),
    # A finished job moves only when an operator retries it.
    JobState.FAILED: frozenset({JobState.PENDING}),
    JobState.CANCELLED: frozenset({JobState.PENDING}),
    JobState.QUARANTINED: frozenset({JobState.PENDING, JobState.CANCELLED}),
}

WORKER_TRANSITIONS: dict[WorkerState, frozenset[WorkerState]] = {
    WorkerState.ACTIVE: frozenset({WorkerState.DRAINING, WorkerState.SUSPECT, WorkerState.DEAD, WorkerState.STOPPED}),
    WorkerState.DRAINING: frozenset({WorkerState.SUSPECT, WorkerState.DEAD, WorkerState.STOPPED}),
    # A suspect that beats again was only slow.
    WorkerState.SUSPECT: frozenset({WorkerState.ACTIVE, WorkerState.DRAINING, WorkerState.DEAD, WorkerState.STOPPED}),
    WorkerState.DEAD: frozenset(),
    WorkerState.STOPPED: frozenset(),
}


def may_move(before: JobState, after: JobState) -> bool:
    """Say whether the ledger may take a job from one state to the other."""
    return after in JOB_TRANSITIONS[before]
