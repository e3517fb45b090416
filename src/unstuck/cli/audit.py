"""Show what operators did, through whichever door: `audit`."""

from typing import Annotated

import typer

from unstuck.cli.common import Common, command
from unstuck.cli.show import Cell, Column, ago
from unstuck.client import views


@command()
def audit(
    common: Common,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, max=100_000, help="At most so many.")] = 100,
) -> None:
    """List what operators did, newest first."""
    with common.reading() as operator:
        found = operator.audit(limit=limit)
    if common.as_json:
        common.show.json([views.audit_view(note) for note in found])
        return
    if not found:
        common.show.empty("Nobody has done anything yet.")
        return
    columns = [Column("when"), Column("by"), Column("door"), Column("verb"), Column("target", wide=True), Column("end")]
    rows: list[list[Cell | str]] = [
        [
            Cell(ago(note.at), "bright_black"),
            note.by,
            note.door,
            Cell(note.verb, "bold"),
            note.target,
            Cell("unknown: it never said", "yellow") if note.outcome is None else note.outcome,
        ]
        for note in found
    ]
    common.show.table(columns, rows)
