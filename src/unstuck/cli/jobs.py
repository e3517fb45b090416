"""Look at jobs: `jobs` lists them, `job` tells the story of one, `logs` gives what it printed."""

import time
from typing import Annotated

import msgspec
import typer

from unstuck.cli.common import Common, Misuse, command, duration_s, job_id
from unstuck.cli.show import Cell, Column, Show, ago, count, one_line, state_cell, took
from unstuck.cli.story import tell_story
from unstuck.client import views
from unstuck.client.operator import PAGE, Operator
from unstuck.domain.errors import ErrorCode
from unstuck.domain.names import did_you_mean
from unstuck.domain.states import FINAL, JobState
from unstuck.store.records import JobFilter, JobRecord

MAX_LISTED = 100_000

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


@command()
def jobs(
    common: Common,
    state: State = None,
    queue: Queue = None,
    task: Task = None,
    error: Error = None,
    older_than: OlderThan = None,
    newer_than: NewerThan = None,
    worker: Annotated[
        str | None, typer.Option("--worker", metavar="WORKER", help="In the hands of this worker (id or name).")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, max=MAX_LISTED, help="At most so many.")] = 100,
) -> None:
    """List jobs, newest first."""
    where = job_filter(state, queue, task, error, older_than, newer_than)
    with common.reading() as operator:
        worker_id = operator.find_worker(worker).id if worker is not None else None
        found = _first(operator, where, worker_id, limit)
    if common.as_json:
        common.show.json([views.job_summary(job) for job in found])
        return
    if not found:
        codes = [code.value for code in ErrorCode]
        hint = did_you_mean(where.error, codes) if where.error and where.error not in codes else ""
        common.show.empty(f"No jobs match.{hint}")
        return
    _list(common.show, found)
    if len(found) == limit and common.show.pretty:
        common.show.note(f"The newest {count(limit, 'job')}; --limit shows more.")


def _first(operator: Operator, where: JobFilter, worker_id: str | None, limit: int) -> list[JobRecord]:
    found: list[JobRecord] = []
    while len(found) < limit:
        size = min(PAGE, limit - len(found))
        before_id = found[-1].id if found else None
        page = operator.jobs(msgspec.structs.replace(where, worker_id=worker_id, before_id=before_id, limit=size))
        found += page
        if len(page) < size:
            break
    return found


def _list(show: Show, found: list[JobRecord]) -> None:
    now_s = time.time()
    columns = [
        Column("id", right=True),
        Column("state"),
        Column("task"),
        Column("queue"),
        Column("enqueued"),
        Column("took", right=True, spare=True),
        Column("tries", right=True, spare=True),
        Column("note", wide=True),
    ]
    show.table(
        columns,
        [
            [
                Cell(str(job.id), "bold"),
                state_cell(job.state, mark=show.pretty),
                job.task,
                job.queue,
                Cell(ago(job.enqueued_at, now_s), "bright_black"),
                took(job.started_at, job.finished_at or (now_s if job.state is JobState.RUNNING else None)),
                str(job.attempt),
                _remark(job, now_s),
            ]
            for job in found
        ],
    )


def _remark(job: JobRecord, now_s: float) -> Cell:
    if job.error is not None:
        # An exception without words, like most MemoryErrors, is told by its type.
        said = job.error.cause or job.error.shown
        what = f"{job.error.code}: {one_line(said)}"
        return Cell(what, "red") if job.state in FINAL else Cell(f"last try: {what}", "yellow")
    if job.cancel_requested:
        return Cell("cancel requested", "yellow")
    if job.awaits is not None:
        return Cell(f"waits for signal {job.awaits!r}", "yellow")
    if job.state is JobState.WAITING:
        return Cell(f"sleeps, goes on {ago(job.run_at, now_s)}", "yellow")
    if job.state is JobState.PENDING and job.run_at > now_s + 1:
        return Cell(f"due {ago(job.run_at, now_s)}", "bright_black")
    return Cell("")


@command()
def job(
    common: Common,
    id: Annotated[str, typer.Argument(metavar="ID", help="The job's number.")],
    full: Annotated[bool, typer.Option("--full", help="All of a long call or result, on a terminal too.")] = False,
) -> None:
    """Tell the story of one job: state, result or error, every attempt and event."""
    number = job_id(id)
    with common.reading() as operator:
        view = operator.job_view(number)
        record = operator.job(number)
        printed = bool(operator.outputs(number))
    if common.as_json:
        common.show.json(view)
    else:
        tell_story(common.show, record, view, printed, full=full)


@command()
def logs(
    common: Common,
    id: Annotated[str, typer.Argument(metavar="JOB", help="The job's number.")],
    raw: Annotated[
        bool, typer.Option("--raw", help="On a terminal too: byte by byte, with colours and escape sequences.")
    ] = False,
) -> None:
    """Give what a job printed: its stdout on stdout, its stderr on stderr."""
    number = job_id(id)
    with common.reading() as operator:
        outputs = operator.outputs(number)
    if common.as_json:
        common.show.json([views.output_view(output) for output in outputs])
        return
    if not outputs:
        common.show.note(f"Job {number} printed nothing, or has not handed in yet what it printed.")
    for at, output in enumerate(outputs, 1):
        if len(outputs) > 1:
            common.show.note(f"── attempt {at} of {len(outputs)} ──")
        common.show.output(output.stdout, output.stderr, raw=raw)


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
            raise Misuse(f"There is no state {word!r}.{did_you_mean(word, known)} States: {', '.join(known)}.")
    return tuple(JobState(word) for word in words)
