"""Say how much may be taken of a queue, and how many of a key may be at work: `queues limit`, `lines`."""

from typing import Annotated

import typer

from unstuck.cli.common import Common, Misuse, command
from unstuck.cli.show import Cell, Column, count
from unstuck.client import views
from unstuck.domain.durations import brief
from unstuck.domain.errors import ConfigError
from unstuck.domain.limits import QueueLimit, limit_in_words, read_limit
from unstuck.store.records import LineRecord, QueueLimitRecord

SHOWN_HOLDERS = 5


@command()
def limit_queue(
    common: Common,
    queue: Annotated[str, typer.Argument(metavar="QUEUE", help="The queue.")],
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", metavar="N", help="So many of its jobs are in hand at once.")
    ] = None,
    rate: Annotated[
        str | None, typer.Option("--rate", metavar="RATE", help="So many are begun in a time: 10/s, 100/m, 1/10s.")
    ] = None,
    none: Annotated[bool, typer.Option("--none", help="No limit, whatever its app says.")] = False,
    declared: Annotated[bool, typer.Option("--as-declared", help="As its app says again.")] = False,
) -> None:
    """Choose the limit of a queue, across all workers, over what its app declares."""
    if [none, declared, concurrency is not None or rate is not None].count(True) != 1:
        raise Misuse("Say --concurrency and --rate (one or both), or --none, or --as-declared.")
    try:
        limit = None if declared else read_limit(concurrency, rate)
    except ConfigError as error:
        raise Misuse(str(error)) from error
    with common.reading() as operator:
        found = operator.limit_queue(queue, limit)
    if common.as_json:
        common.show.json(None if found is None else views.limit_view(found))
    elif limit is None:
        common.show.say(
            f"Queue {queue!r} takes its limit from its app again, with the next worker that starts.", "green"
        )
    else:
        common.show.say(f"Queue {queue!r}: {limit_in_words(limit)}.", "green")


def limit_cell(record: QueueLimitRecord | None) -> str:
    """Say the limit of a queue and how much of it is in use, for a table."""
    if record is None or not record.limit:
        return ""
    limit = record.limit
    said = [] if limit.concurrency is None else [f"{record.held} of {limit.concurrency}"]
    if limit.rate is not None:
        wait = "" if record.in_s is None else f", next in {brief(record.in_s)}"
        said.append(f"{limit_in_words(QueueLimit(None, limit.rate, limit.window_s))}{wait}")
    return "; ".join(said)


@command()
def lines(common: Common, ctx: typer.Context) -> None:
    """Lines of jobs with one concurrency key: who has their places, and how many wait."""
    if ctx.invoked_subcommand is not None:
        return
    with common.reading() as operator:
        found = operator.lines(limit=1_000)
    show = common.show
    if show.as_json:
        show.json([views.line_view(line) for line in found])
        return
    if not found:
        show.empty("Nobody stands in a line: no job with a concurrency_key waits or runs.")
        return
    columns = [Column("key"), Column("limit", right=True), Column("held by"), Column("wait", right=True)]
    show.table([*columns, Column("note", wide=True)], [_row(line) for line in found])


def _row(line: LineRecord) -> list[Cell | str]:
    named = ", ".join(f"{one.job_id} ({one.state})" for one in line.holders[:SHOWN_HOLDERS])
    more = len(line.holders) - SHOWN_HOLDERS
    note = f"chosen by {line.pinned_by}" if line.pinned_by else ""
    return [
        Cell(line.key, "bold"),
        str(line.places),
        f"{named} and {more} more" if more > 0 else named,
        str(line.blocked),
        Cell(note, "bright_black"),
    ]


@command()
def limit_line(
    common: Common,
    key: Annotated[str, typer.Argument(metavar="KEY", help="The concurrency key.")],
    places: Annotated[int | None, typer.Argument(metavar="[N]", help="So many are at work at once.")] = None,
    none: Annotated[bool, typer.Option("--as-enqueued", help="As its jobs say again.")] = False,
) -> None:
    """Choose how many jobs of one key may be at work at once, over what is enqueued later."""
    if (places is None) == (not none):
        raise Misuse("Say how many, or --as-enqueued.")
    with common.reading() as operator:
        try:
            found = operator.limit_line(key, places)
        except ConfigError as error:
            raise Misuse(str(error)) from error
    if common.as_json:
        common.show.json(None if found is None else views.line_view(found))
    elif places is None:
        common.show.say(f"Line {key!r} takes its limit from what is enqueued.", "green")
    else:
        common.show.say(f"Line {key!r}: {count(places, 'job')} at once.", "green")
