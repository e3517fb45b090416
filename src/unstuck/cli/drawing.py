"""Draw a workflow on the terminal: a line for each node, in order of dependency, groups and maps indented."""

import time
from collections.abc import Sequence

from unstuck.cli.show import Cell, Column, Show, ago, one_line, state_cell, took
from unstuck.client.flow.outline import Item, Outline, outline
from unstuck.client.flow.words import error_text, headline, hints, summary
from unstuck.store.records import WorkflowRecord

WHOLE = 10
"""A map with more members than that is summed up; those that are worth a line are shown all the same."""
SHOWN_OF_MANY = 5
NOTABLE = ("failed", "quarantined", "paused", "running")
"""Members of a large map that get a line of their own, the first of these first."""


def draw(show: Show, workflow: WorkflowRecord, whole: bool = False) -> None:
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
    show: Show,
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


def _row(show: Show, shape: Outline, item: Item, branch: str, now_s: float) -> list[Cell | str]:
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
