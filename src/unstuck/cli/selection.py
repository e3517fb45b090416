"""Read from the options of a command which jobs it is about."""

from typing import Annotated

import typer

from unstuck.cli.context import UsageError, duration_s
from unstuck.domain.states import JobState
from unstuck.domain.text import did_you_mean
from unstuck.ledger.contract.jobs import JobFilter

State = Annotated[
    list[str] | None, typer.Option("--state", metavar="STATE", help="Of these states; repeat it or use commas.")
]
Queue = Annotated[str | None, typer.Option("--queue", metavar="QUEUE", help="Of this queue.")]
Task = Annotated[str | None, typer.Option("--task", metavar="TASK", help="Of this task.")]
Error = Annotated[str | None, typer.Option("--error", metavar="CODE", help="With this error, e.g. WORKER_CRASHED.")]
OlderThan = Annotated[
    str | None, typer.Option("--older-than", metavar="AGE", help="Enqueued longer ago than this, e.g. 10m.")
]
NewerThan = Annotated[
    str | None, typer.Option("--newer-than", metavar="AGE", help="Enqueued within this time, e.g. 1h.")
]


def job_filter(
    state: list[str] | None,
    queue: str | None,
    task: str | None,
    error: str | None,
    older_than: str | None = None,
    newer_than: str | None = None,
) -> JobFilter:
    """Read the options that choose jobs."""
    return JobFilter(
        states=states(state),
        queue=queue,
        task=task,
        error=error.upper() if error is not None else None,
        older_than_s=duration_s(older_than, "--older-than"),
        newer_than_s=duration_s(newer_than, "--newer-than"),
    )


def states(given: list[str] | None) -> tuple[JobState, ...]:
    known = [state.value for state in JobState]
    words = [word.strip().lower() for text in given or [] for word in text.split(",") if word.strip()]
    for word in words:
        if word not in known:
            raise UsageError(f"There is no state {word!r}.{did_you_mean(word, known)} States: {', '.join(known)}.")
    return tuple(JobState(word) for word in words)
