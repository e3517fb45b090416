"""Look at queues, stop and start them, empty them: `queues`, `pause`, `resume`, `purge`."""

import sys
from typing import Annotated

import typer

from unstuck.cli.common import Common, Misuse, command
from unstuck.cli.limits import limit_cell
from unstuck.cli.show import Cell, Column, coarse, confirm, count, state_cell
from unstuck.client import views
from unstuck.store.records import QueueRecord

Name = Annotated[str | None, typer.Argument(metavar="[QUEUE]", help="The queue.")]
Every = Annotated[bool, typer.Option("--all", help="Every queue.")]


@command()
def queues(common: Common, ctx: typer.Context) -> None:
    """List queues with what waits in them, their limits, and who serves them."""
    if ctx.invoked_subcommand is not None:
        return
    with common.reading() as operator:
        found = sorted(operator.queues(), key=lambda queue: queue.name)
        limits = {record.name: record for record in operator.queue_limits()}
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
    common.show.table(columns, [_row(queue, limit, common.show.pretty) for queue, limit in shown])


def _row(queue: QueueRecord, limit: list[str], pretty: bool) -> list[Cell | str]:
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
def pause(common: Common, queue: Name = None, all: Every = False) -> None:
    """Stop handing out jobs of a queue; those that run go on."""
    _check_target(queue, all)
    with common.reading() as operator:
        changed = operator.pause(queue)
    _tell(common, changed, "paused", queue)


@command()
def resume(common: Common, queue: Name = None, all: Every = False) -> None:
    """Hand out jobs of a paused queue again."""
    _check_target(queue, all)
    with common.reading() as operator:
        changed = operator.resume(queue)
    _tell(common, changed, "resumed", queue)


def _check_target(queue: str | None, all: bool) -> None:
    if (queue is None) == (not all):
        raise Misuse("Give the name of one queue, or --all.")


def _tell(common: Common, changed: list[str], verb: str, queue: str | None) -> None:
    if common.as_json:
        common.show.json({verb: sorted(changed)})
    elif changed:
        common.show.say(f"{verb.capitalize()}: {', '.join(sorted(changed))}.", "green")
    else:
        common.show.say(f"Nothing to do: {f'queue {queue!r} is' if queue else 'every queue is'} {verb} already.")


@command()
def purge(
    common: Common,
    queue: Annotated[str, typer.Argument(metavar="QUEUE", help="The queue.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Cancel the jobs of a queue that have not begun.

    Jobs that run, sleep, wait for a signal or wait for their next try go on. So do the nodes of workflows that have
    begun.
    """
    with common.reading() as operator:
        found = operator.known_queue(queue)
        if not yes:
            _confirm(found)
        cancelled = operator.purge(queue)
        left = operator.known_queue(queue)
    if common.as_json:
        common.show.json({"queue": queue, "cancelled": cancelled})
    else:
        common.show.say(f"Cancelled {count(cancelled, 'pending job')} of queue {queue!r}.", "green")
        if spared := left.pending + left.scheduled + left.blocked:
            hint = f"`unstuck cancel --queue {queue}` cancels them too"
            common.show.note(f"{count(spared, 'job')} that had begun, or came meanwhile, stayed; {hint}.")


def _confirm(queue: QueueRecord) -> None:
    if not sys.stdin.isatty():
        raise Misuse(f"purge cancels the pending jobs of {queue.name!r}. Say --yes if there is no terminal to ask on.")
    waiting = queue.pending + queue.scheduled + queue.blocked
    confirm(f"Cancel up to {count(waiting, 'pending job')} of queue {queue.name!r}? Jobs that have begun go on.")
