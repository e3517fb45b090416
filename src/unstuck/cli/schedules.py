"""Look at schedules and act on them: `schedules list`, `add`, `pause`, `resume`, `run`, `remove`."""

import time
from typing import Annotated, Any

import typer

from unstuck.cli.context import Context, UsageError, command
from unstuck.cli.enqueue import arguments
from unstuck.cli.output import Cell, Column, coarse, state_cell
from unstuck.client.views import schedule_view, workers_firing
from unstuck.domain.schedules import CATCH_UPS, CatchUp
from unstuck.errors import ConfigError
from unstuck.ledger.contract.schedules import ScheduleRecord
from unstuck.ledger.contract.workers import WorkerRecord

Name = Annotated[str, typer.Argument(metavar="NAME", help="The schedule.")]


@command()
def schedules(common: Context, ctx: typer.Context) -> None:
    """What is enqueued by the clock: list it, stop it, run it now."""
    if ctx.invoked_subcommand is None:
        _list(common)


@command()
def list_schedules(common: Context) -> None:
    """List schedules with their next and last tick."""
    _list(common)


def _list(common: Context) -> None:
    with common.operator() as operator:
        workers = operator.ledger.workers.list(living_only=True)
        found = operator.ledger.schedules.list()
    if common.as_json:
        common.show.json([schedule_view(record, workers) for record in found])
        return
    if not found:
        common.show.empty("No schedules: write @app.schedule(…) above a task, or use `unstuck schedules add`.")
        return
    columns = [
        *(Column("schedule"), Column("state"), Column("when"), Column("task", spare=True), Column("next")),
        *(Column("last"), Column("last job", right=True, spare=True), Column("note", wide=True)),
    ]
    common.show.table(columns, [_row(record, workers, common.show.pretty) for record in found])


def _row(record: ScheduleRecord, workers: list[WorkerRecord], pretty: bool) -> list[Cell | str]:
    now = time.time()
    alone = not workers_firing(record, workers)
    note = f"paused by {record.paused_by}" if record.paused else "no living worker knows it" if alone else ""
    late_s = 0.0 if record.next_at is None else now - record.next_at
    upcoming = "-" if record.next_at is None else f"in {coarse(-late_s)}" if late_s <= 0 else f"{coarse(late_s)} late"
    return [
        Cell(record.name, "bold"),
        state_cell("paused" if record.paused else "open", mark=pretty),
        str(record.timing),
        record.task,
        Cell("-" if record.paused else upcoming, "red" if late_s > 1 and not record.paused else ""),
        Cell("-" if record.last_at is None else f"{coarse(max(0.0, now - record.last_at))} ago", "bright_black"),
        str(record.last_job_id or "-"),
        Cell(note, "red" if alone and not record.paused else "yellow"),
    ]


@command()
def add(
    common: Context,
    name: Name,
    task: Annotated[str, typer.Argument(metavar="TASK", help="The task, as workers know it.")],
    args: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Its arguments, each as JSON.")] = None,
    cron: Annotated[str | None, typer.Option("--cron", metavar="EXPRESSION", help="As in '*/5 * * * *'.")] = None,
    every: Annotated[str | None, typer.Option("--every", metavar="DURATION", help="As in 30s or 2h.")] = None,
    tz: Annotated[str, typer.Option("--tz", metavar="ZONE", help="Of the cron expression.")] = "UTC",
    catch_up: Annotated[str, typer.Option("--catch-up", metavar="POLICY", help="skip, latest or all.")] = "latest",
    kwargs: Annotated[str | None, typer.Option("--kwargs", metavar="JSON", help="Named arguments.")] = None,
    queue: Annotated[str | None, typer.Option("--queue", metavar="QUEUE", help="Another queue.")] = None,
    priority: Annotated[int, typer.Option("--priority", metavar="N", help="-1000 to 1000.")] = 0,
    unique_key: Annotated[
        str | None, typer.Option("--unique-key", metavar="KEY", help="Enqueue none while one with it is unfinished.")
    ] = None,
) -> None:
    """Make a schedule that no code names, or change one that was made so."""
    positional, named = arguments(args or [], kwargs)
    with common.operator() as operator:
        try:
            record = operator.schedules.create(
                name,
                task,
                cron=cron,
                every=every,
                tz=tz,
                catch_up=_catch_up(catch_up),
                args=positional,
                kwargs=named,
                queue=queue,
                priority=priority,
                unique_key=unique_key,
            )
        except ConfigError as error:
            raise UsageError(str(error)) from error
        workers = operator.ledger.workers.list(living_only=True)
    if common.as_json:
        common.show.json(schedule_view(record, workers))
    else:
        common.show.say(f"Schedule {name!r} enqueues {task}: {record.timing}.", "green")


def _catch_up(text: str) -> CatchUp:
    for policy in CATCH_UPS:
        if text == policy:
            return policy
    raise UsageError(f"--catch-up is one of {', '.join(CATCH_UPS)}, not {text!r}.")


@command()
def pause(common: Context, name: Name) -> None:
    """Stop a schedule; what it enqueued runs."""
    with common.operator() as operator:
        changed = operator.schedules.pause(name)
    _tell(common, name, "paused", changed)


@command()
def resume(common: Context, name: Name) -> None:
    """Let a schedule go on with its next tick."""
    with common.operator() as operator:
        changed = operator.schedules.resume(name)
    _tell(common, name, "resumed", changed)


@command()
def run(common: Context, name: Name) -> None:
    """Enqueue the job of a schedule now, beside its ticks."""
    with common.operator() as operator:
        job_id = operator.schedules.run(name)
    if common.as_json:
        common.show.json({"name": name, "job_id": job_id})
    else:
        common.show.say(f"Schedule {name!r} runs now: job {job_id}.", "green")


@command()
def remove(common: Context, name: Name) -> None:
    """Forget a schedule; what it enqueued stays."""
    with common.operator() as operator:
        known_by = operator.schedules.remove(name)
    if common.as_json:
        common.show.json({"name": name, "removed": True, "workers": known_by})
        return
    common.show.say(f"Schedule {name!r} is removed.", "green")
    if known_by:
        common.show.note("It still stands in the code of living workers, and comes back when one starts: take it out.")


def _tell(common: Context, name: str, word: str, changed: bool) -> None:
    answer: dict[str, Any] = {"name": name, word: changed}
    if common.as_json:
        common.show.json(answer)
    elif changed:
        common.show.say(f"Schedule {name!r} is {word}.", "green")
    else:
        common.show.say(f"Nothing to do: schedule {name!r} {'is' if word == 'paused' else 'was not'} paused already.")
