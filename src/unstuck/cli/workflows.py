"""Commands for workflows: list, show as a tree, retry, resume, cancel."""

import sys
import time
from collections.abc import Sequence
from typing import Annotated

import typer

from unstuck.cli.context import Context, UsageError, command, job_id
from unstuck.cli.jobs import MAX_LISTED
from unstuck.cli.output import Cell, Column, Output, ago, confirm, count, one_line, state_cell, took
from unstuck.client.operator import Operator
from unstuck.client.operator.jobs import PAGE
from unstuck.client.views import workflow_summary, workflow_view
from unstuck.client.workflows.outline import ORDER, Item, Outline, outline
from unstuck.client.workflows.text import error_text, headline, hints, summary
from unstuck.domain.text import did_you_mean
from unstuck.domain.workflows import WorkflowState
from unstuck.ledger.contract.workflows import WorkflowRecord

WHOLE = 10
"""A map with more members than that is summed up; those that are worth a line are shown all the same."""
SHOWN_OF_MANY = 5
NOTABLE = ("failed", "quarantined", "paused", "running")
"""Members of a large map that get a line of their own, the first of these first."""


def draw(show: Output, workflow: WorkflowRecord, whole: bool = False) -> None:
    now_s = time.time()
    shape = outline(workflow)
    show.rich(
        Cell(f"Workflow {workflow.id}", "bold"), f"  {workflow.name}  ", state_cell(workflow.state, mark=show.pretty)
    )
    show.rich(Cell(one_line(headline(workflow)), "bold"))
    spent = took(workflow.created_at, workflow.finished_at or now_s)
    verb = "took" if workflow.finished_at is not None else "for"
    show.rich(Cell(f"started {ago(workflow.created_at, now_s)}, {verb} {spent}", "bright_black"))
    show.rich()
    columns = [
        Column("node"),
        Column("state"),
        Column("job", right=True),
        Column("task", spare=True),
        Column("started", spare=True),
        Column("took", right=True),
        Column("note", wide=True),
    ]
    rows: list[list[Cell | str]] = []
    _add(show, shape, shape.items, "", rows, now_s, whole)
    show.table(columns, rows, indent=2, wrap=True)
    # Not the one that draws it: that was just done.
    told = [hint for hint in hints(workflow) if hint.command != f"unstuck workflow {workflow.id}"]
    if told:
        show.rich()
        show.facts([(hint.command, Cell(hint.why)) for hint in told], names="green")


def _add(
    show: Output,
    shape: Outline,
    items: Sequence[Item],
    stem: str,
    rows: list[list[Cell | str]],
    now_s: float,
    whole: bool,
) -> None:
    for at, item in enumerate(items):
        last = at == len(items) - 1
        branch = stem if not stem and item.node.parent == 0 else f"{stem}{'└─ ' if last else '├─ '}"
        rows.append(_row(show, shape, item, branch, now_s))
        below = f"{stem}{'   ' if last else '│  '}" if item.node.parent else ""
        shown = _shown(item, whole)
        _add(show, shape, shown, below or " ", rows, now_s, whole)
        left = len(item.inside) - len(shown)
        if left and shown:
            rows.append([Cell(f"{below or ' '}   … {left:,} more", "bright_black"), *[""] * 6])


def _shown(item: Item, whole: bool) -> Sequence[Item]:
    if whole or item.node.kind != "map" or len(item.inside) <= WHOLE:
        return item.inside
    notable = [one for state in NOTABLE for one in item.inside if one.state == state]
    return notable[:SHOWN_OF_MANY]


def _row(show: Output, shape: Outline, item: Item, branch: str, now_s: float) -> list[Cell | str]:
    node = item.node
    kind = "" if node.kind == "task" else f" ({node.kind}{f' of {len(item.inside):,}' if node.kind == 'map' else ''})"
    going = item.state in ("running", "claimed")
    return [
        Cell(f"{branch}{node.name}{kind}", "bold" if node.kind != "task" else ""),
        state_cell(item.state, mark=show.pretty),
        "" if node.job_id is None else str(node.job_id),
        node.task or "",
        Cell(ago(item.started_at, now_s), "bright_black"),
        took(item.started_at, node.finished_at or (now_s if going else None)),
        _note(shape, item),
    ]


def _note(shape: Outline, item: Item) -> Cell:
    node = item.node
    said = []
    if item.counts:
        said.append(summary(item.counts))
    if node.error is not None and item.state == "cancelled":
        said.append(node.error.get("cause") or error_text(node))
    elif node.error is not None:
        inner = node.error.get("node")
        where = f"{inner}: " if node.kind != "task" and inner and inner != node.name else ""
        said.append(f"{where}{error_text(node)}")
        if node.state == "failed" and node.on_error == "continue":
            said.append("those after it go on with its error")
    elif item.after and item.state == "waiting":
        said.append(f"waits for {', '.join(_waited(shape, item))}")
    elif item.after:
        said.append(f"after {', '.join(shape.nodes[place].name for place in item.after if place in shape.nodes)}")
    style = "red" if item.state in ("failed", "quarantined", "paused") else "bright_black"
    return Cell(one_line("; ".join(said)), style)


def _waited(shape: Outline, item: Item) -> list[str]:
    """Name those that it still waits for; all of them where none is left."""
    places = [place for place in item.after if place in shape.nodes]
    open_ = [place for place in places if shape.nodes[place].finished_at is None]
    return [shape.nodes[place].name for place in open_ or places]


Id = Annotated[str, typer.Argument(metavar="ID", help="The workflow's number.")]
State = Annotated[str | None, typer.Option("--state", metavar="STATE", help="Only those in this state.")]
Limit = Annotated[int, typer.Option("--limit", metavar="N", min=1, max=MAX_LISTED, help="At most so many.")]
Whole = Annotated[bool, typer.Option("--all", help="Every member of large maps too.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


@command()
def workflow(common: Context, id: Id, all: Whole = False) -> None:
    """Draw a workflow with the states and times of its nodes, and what failed."""
    number = job_id(id)
    with common.operator() as operator:
        found = operator.workflows.get(number)
    if common.as_json:
        common.show.json(workflow_view(found))
    else:
        draw(common.show, found, whole=all)


@command()
def workflows(common: Context, ctx: typer.Context, state: State = None, limit: Limit = 100) -> None:
    """List workflows, take them up again, go past what is paused, give them up."""
    if ctx.invoked_subcommand is None:
        _list(common, state, limit)


@command()
def list_workflows(common: Context, state: State = None, limit: Limit = 100) -> None:
    """List workflows, newest first."""
    _list(common, state, limit)


def _list(common: Context, state: str | None, limit: int) -> None:
    known = [one.value for one in WorkflowState]
    if state is not None and state.lower() not in known:
        raise UsageError(
            f"There is no such state of a workflow: {state!r}.{did_you_mean(state, known)} States: {', '.join(known)}."
        )
    with common.operator() as operator:
        found = _first(operator, state.lower() if state else None, limit)
    if common.as_json:
        common.show.json([workflow_summary(one) for one in found])
    elif not found:
        common.show.empty("No workflows match." if state else "No workflows yet: `app.workflow(name)` builds one.")
    else:
        _table(common.show, found)
        if len(found) == limit and common.show.pretty:
            common.show.note(f"The newest {count(limit, 'workflow')}; --limit shows more.")


def _first(operator: Operator, state: str | None, limit: int) -> list[WorkflowRecord]:
    found: list[WorkflowRecord] = []
    while len(found) < limit:
        size = min(PAGE, limit - len(found))
        page = operator.ledger.workflows.list(state, found[-1].id if found else None, size)
        found += page
        if len(page) < size:
            break
    return found


def _table(show: Output, found: list[WorkflowRecord]) -> None:
    now_s = time.time()
    columns = [
        Column("id", right=True),
        Column("state"),
        Column("name"),
        Column("started"),
        Column("took", right=True, spare=True),
        Column("nodes", wide=True),
    ]
    show.table(
        columns,
        [
            [
                Cell(str(one.id), "bold"),
                state_cell(one.state, mark=show.pretty),
                one.name,
                Cell(ago(one.created_at, now_s), "bright_black"),
                took(one.created_at, one.finished_at or now_s),
                Cell(summary(in_order(one.counts)), "bright_black"),
            ]
            for one in found
        ],
    )


def in_order(counts: dict[str, int]) -> dict[str, int]:
    return {state: counts[state] for state in (*ORDER, *(set(counts) - set(ORDER))) if state in counts}


@command()
def retry(common: Context, id: Id) -> None:
    """Take a workflow up again from what failed; what succeeded is kept."""
    number = job_id(id)
    with common.operator() as operator:
        before = operator.workflows.get(number)
        done = operator.workflows.retry(number)
    why = f"it is {before.state}; only one that failed, was cancelled or is paused can be taken up again"
    _tell(common, number, done, "retried", f"Workflow {number} goes on from what failed.", why)


@command()
def resume(common: Context, id: Id) -> None:
    """Go on past what is paused: those who depend on it get its error."""
    number = job_id(id)
    with common.operator() as operator:
        before = operator.workflows.get(number)
        done = operator.workflows.resume(number)
    why = f"it is {before.state}, not paused"
    _tell(common, number, done, "resumed", f"Workflow {number} goes on past what failed.", why)


@command()
def cancel(common: Context, id: Id, yes: Yes = False) -> None:
    """Give a workflow up: what was not begun is cancelled, what runs is told to stop."""
    number = job_id(id)
    with common.operator() as operator:
        before = operator.workflows.get(number)
        if before.finished_at is None and not yes:
            _confirm(before)
        done = operator.workflows.cancel(number)
    said = f"Workflow {number} is cancelled; what runs of it is told to stop."
    _tell(common, number, done, "cancelled", said, f"it has ended already: {before.state}")


def _confirm(workflow: WorkflowRecord) -> None:
    if not sys.stdin.isatty():
        return
    confirm(f"Cancel workflow {workflow.id} ({workflow.name})?")


def _tell(common: Context, number: int, done: bool, word: str, said: str, why: str) -> None:
    if common.as_json:
        common.show.json({"id": number, word: done})
    elif done:
        common.show.say(said, "green")
    else:
        common.show.note(f"Nothing was done to workflow {number}: {why}.")
    if not done:
        raise typer.Exit(1)
