"""Look after jobs that killed their processes too often: `quarantine list`, `quarantine release`."""

import time
from typing import Annotated

import typer

from unstuck.cli.common import Common, Misuse, command, job_id
from unstuck.cli.jobs import MAX_LISTED, Task
from unstuck.cli.recovery import Ids
from unstuck.cli.show import Cell, Column, Show, ago, count
from unstuck.client.quarantine import Quarantined, quarantined_view
from unstuck.domain.states import JobState
from unstuck.store.records import JobFilter

VICTIMS_SHOWN = 3
NAMED = 20
"""What became of so many jobs is said one by one; of more, in numbers."""


@command()
def quarantine(common: Common, ctx: typer.Context) -> None:
    """Jobs that killed their processes too often: list them, or let them go."""
    if ctx.invoked_subcommand is None:
        _list(common, None, 100)


@command()
def list_quarantined(
    common: Common,
    task: Task = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, max=MAX_LISTED, help="At most so many.")] = 100,
) -> None:
    """List quarantined jobs, newest first, with what they killed."""
    _list(common, task, limit)


def _list(common: Common, task: str | None, limit: int) -> None:
    with common.reading() as operator:
        found = operator.quarantined(task, limit)
    show = common.show
    if show.as_json:
        show.json([quarantined_view(job) for job in found])
        return
    if not found:
        show.empty("No job is quarantined.")
        return
    _table(show, found)
    if show.pretty:
        show.note("`unstuck why ID` tells the story of one; `unstuck quarantine release ID` queues it again.")


def _table(show: Show, found: list[Quarantined]) -> None:
    now_s = time.time()
    columns = [
        Column("job", right=True),
        Column("task"),
        Column("queue", spare=True),
        Column("crashes", right=True),
        Column("since"),
        Column("killed", wide=True),
    ]
    show.table(
        columns,
        [
            [
                Cell(str(job.job_id), "bold"),
                job.task,
                job.queue,
                str(job.crash_count),
                Cell(ago(job.quarantined_at, now_s), "bright_black"),
                Cell(_killed(job), "red"),
            ]
            for job in found
        ],
        wrap=True,
    )


def _killed(job: Quarantined) -> str:
    """Name the last few: what it did lately says most."""
    named = [
        f"{victim.worker_name or victim.worker}{f' on {victim.host}' if victim.host else ''}: {victim.cause}"
        for victim in reversed(job.victims[-VICTIMS_SHOWN:])
    ]
    more = len(job.victims) - len(named)
    return "; ".join(named) + (f"; and {more} more (--json has all)" if more > 0 else "")


@command()
def release(
    common: Common,
    ids: Ids = None,
    task: Task = None,
    all: Annotated[bool, typer.Option("--all", help="Every quarantined job.")] = False,
) -> None:
    """Queue quarantined jobs again with fresh counters: by number, of one task, or all.

    Each runs alone in its process, since it killed those that it was in."""
    if sum((bool(ids), task is not None, all)) != 1:
        raise Misuse("Give the numbers of jobs, or --task NAME, or --all; one of the three.")
    numbers = [job_id(text) for text in ids or []]
    with common.reading() as operator:
        if not numbers:
            numbers = list(operator.matching(JobFilter(states=(JobState.QUARANTINED,), task=task)))
        answers = operator.release(numbers)
    _tell(common.show, answers)
    if ids and any(answer != "queued" for answer in answers.values()):
        raise typer.Exit(1)


def _tell(show: Show, answers: dict[int, str]) -> None:
    if show.as_json:
        show.json([{"id": number, "answer": answer} for number, answer in answers.items()])
        return
    released = [number for number, answer in answers.items() if answer == "queued"]
    if not answers:
        show.empty("No job is quarantined there.")
    if len(released) > NAMED:
        show.say(f"{count(len(released), 'job')} are queued again, each alone in its process.", "green")
    else:
        for number in released:
            show.say(f"Job {number} is queued again with fresh counters, and runs alone in its process.", "green")
    for number, answer in answers.items():
        if answer != "queued":
            show.note(f"Job {number} was not released: {_refusal(number, answer)}")
    show.missing(answers.values())


def _refusal(number: int, answer: str) -> str:
    match answer:
        case "missing":
            return "it does not exist."
        case "duplicate":
            return "its unique key is in use by another job that is not finished."
        case "failed" | "cancelled":
            return f"it is not quarantined but {answer}. `unstuck retry {number}` queues it again."
        case "live":
            return "somebody was faster, and it is queued already."
        case _:
            return f"it is not quarantined but {answer}."
