"""Commands for queues and concurrency keys: look, pause, resume, purge, set limits."""

import sys
from typing import Annotated

import typer

from unstuck.cli.context import Context, UsageError, command
from unstuck.cli.output import Cell, Column, coarse, confirm, count, state_cell
from unstuck.client import views
from unstuck.domain.limits import QueueLimit, limit_in_words, read_limit
from unstuck.domain.units import brief
from unstuck.errors import ConfigError
from unstuck.ledger.contract.queues import KeyRecord, QueueLimitRecord, QueueRecord

Name = Annotated[str | None, typer.Argument(metavar="[QUEUE]", help="The queue.")]
Every = Annotated[bool, typer.Option("--all", help="Every queue.")]


@command()
def queues(common: Context, ctx: typer.Context) -> None:
    """List queues with what waits in them, their limits, and who serves them."""
    if ctx.invoked_subcommand is not None:
        return
    with common.operator() as operator:
        found = sorted(operator.ledger.queues.list(), key=lambda queue: queue.name)
        limits = {record.name: record for record in operator.ledger.queues.limits()}
    if common.as_json:
        common.show.json([views.queue_view(queue, limits.get(queue.name)) for queue in found])
        return
    if not found:
        common.show.empty("No queues yet: they appear with their first job or worker.")
        return
    columns = [Column("queue"), Column("state")]
    numbers = ("pending", "blocked", "scheduled", "claimed", "running", "waiting", "workers")
    columns += [
        Column(title, right=True, spare=title in ("blocked", "scheduled", "claimed", "waiting")) for title in numbers
    ]
    columns += [Column("oldest")]
    if limits:
        columns += [Column("limit")]
    columns += [Column("note", wide=True)]
    shown = [(queue, [limit_cell(limits.get(queue.name))] if limits else []) for queue in found]
    common.show.table(columns, [_queue_row(queue, limit, common.show.pretty) for queue, limit in shown])


def _queue_row(queue: QueueRecord, limit: list[str], pretty: bool) -> list[Cell | str]:
    numbers = (queue.pending, queue.blocked, queue.scheduled, queue.claimed, queue.running, queue.waiting)
    alone = queue.workers == 0 and queue.pending + queue.blocked + queue.scheduled > 0
    return [
        Cell(queue.name, "bold"),
        state_cell("paused" if queue.paused else "open", mark=pretty),
        *(Cell(f"{number:,}" if pretty else str(number), "" if number else "bright_black") for number in numbers),
        Cell(str(queue.workers), "bold red" if alone else ""),
        Cell("" if queue.oldest_pending_s is None else coarse(queue.oldest_pending_s), "bright_black"),
        *limit,
        Cell("no living worker serves it" if alone else "", "red"),
    ]


@command()
def pause(common: Context, queue: Name = None, all: Every = False) -> None:
    """Stop handing out jobs of a queue; those that run go on."""
    _check_target(queue, all)
    with common.operator() as operator:
        changed = operator.queues.pause(queue)
    _tell(common, changed, "paused", queue)


@command()
def resume(common: Context, queue: Name = None, all: Every = False) -> None:
    """Hand out jobs of a paused queue again."""
    _check_target(queue, all)
    with common.operator() as operator:
        changed = operator.queues.resume(queue)
    _tell(common, changed, "resumed", queue)


def _check_target(queue: str | None, all: bool) -> None:
    if (queue is None) == (not all):
        raise UsageError("Give the name of one queue, or --all.")


def _tell(common: Context, changed: list[str], verb: str, queue: str | None) -> None:
    if common.as_json:
        common.show.json({verb: sorted(changed)})
    elif changed:
        common.show.say(f"{verb.capitalize()}: {', '.join(sorted(changed))}.", "green")
    else:
        common.show.say(f"Nothing to do: {f'queue {queue!r} is' if queue else 'every queue is'} {verb} already.")


@command()
def purge(
    common: Context,
    queue: Annotated[str, typer.Argument(metavar="QUEUE", help="The queue.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Cancel the jobs of a queue that have not begun.

    Jobs that run, sleep, wait for a signal or wait for their next try go on. So do the nodes of workflows that have
    begun.
    """
    with common.operator() as operator:
        found = operator.queues.get(queue)
        if not yes:
            _confirm(found)
        cancelled = operator.queues.purge(queue)
        left = operator.queues.get(queue)
    if common.as_json:
        common.show.json({"queue": queue, "cancelled": cancelled})
    else:
        common.show.say(f"Cancelled {count(cancelled, 'pending job')} of queue {queue!r}.", "green")
        if spared := left.pending + left.scheduled + left.blocked:
            hint = f"`unstuck cancel --queue {queue}` cancels them too"
            common.show.note(f"{count(spared, 'job')} that had begun, or came meanwhile, stayed; {hint}.")


def _confirm(queue: QueueRecord) -> None:
    if not sys.stdin.isatty():
        raise UsageError(
            f"purge cancels the pending jobs of {queue.name!r}. Say --yes if there is no terminal to ask on."
        )
    waiting = queue.pending + queue.scheduled + queue.blocked
    confirm(f"Cancel up to {count(waiting, 'pending job')} of queue {queue.name!r}? Jobs that have begun go on.")


SHOWN_HOLDERS = 5


@command()
def limit_queue(
    common: Context,
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
        raise UsageError("Say --concurrency and --rate (one or both), or --none, or --as-declared.")
    try:
        limit = None if declared else read_limit(concurrency, rate)
    except ConfigError as error:
        raise UsageError(str(error)) from error
    with common.operator() as operator:
        found = operator.queues.limit(queue, limit)
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
def lines(common: Context, ctx: typer.Context) -> None:
    """Lines of jobs with one concurrency key: who has their places, and how many wait."""
    if ctx.invoked_subcommand is not None:
        return
    with common.operator() as operator:
        found = operator.ledger.queues.concurrency_keys(limit=1_000)
    show = common.show
    if show.as_json:
        show.json([views.line_view(key) for key in found])
        return
    if not found:
        show.empty("Nobody stands in a line: no job with a concurrency_key waits or runs.")
        return
    columns = [Column("key"), Column("limit", right=True), Column("held by"), Column("wait", right=True)]
    show.table([*columns, Column("note", wide=True)], [_key_row(key) for key in found])


def _key_row(key: KeyRecord) -> list[Cell | str]:
    named = ", ".join(f"{one.job_id} ({one.state})" for one in key.holders[:SHOWN_HOLDERS])
    more = len(key.holders) - SHOWN_HOLDERS
    note = f"chosen by {key.pinned_by}" if key.pinned_by else ""
    return [
        Cell(key.key, "bold"),
        str(key.places),
        f"{named} and {more} more" if more > 0 else named,
        str(key.blocked),
        Cell(note, "bright_black"),
    ]


@command()
def limit_key(
    common: Context,
    key: Annotated[str, typer.Argument(metavar="KEY", help="The concurrency key.")],
    places: Annotated[int | None, typer.Argument(metavar="[N]", help="So many are at work at once.")] = None,
    none: Annotated[bool, typer.Option("--as-enqueued", help="As its jobs say again.")] = False,
) -> None:
    """Choose how many jobs of one key may be at work at once, over what is enqueued later."""
    if (places is None) == (not none):
        raise UsageError("Say how many, or --as-enqueued.")
    with common.operator() as operator:
        try:
            found = operator.queues.limit_key(key, places)
        except ConfigError as error:
            raise UsageError(str(error)) from error
    if common.as_json:
        common.show.json(None if found is None else views.line_view(found))
    elif places is None:
        common.show.say(f"Line {key!r} takes its limit from what is enqueued.", "green")
    else:
        common.show.say(f"Line {key!r}: {count(places, 'job')} at once.", "green")
