"""Show where a running job stands: `stack` asks its worker, and the job goes on undisturbed."""

from typing import Annotated

import typer

from unstuck.cli.common import Common, command, job_id
from unstuck.cli.show import Cell
from unstuck.client import views

NOT_TOLD = 1


@command()
def stack(
    common: Common,
    id: Annotated[str, typer.Argument(metavar="JOB", help="The job's number.")],
    wait: Annotated[float, typer.Option("--wait", metavar="SECONDS", min=0.1, max=600.0, help="At most so long.")] = 10,
) -> None:
    """Show where a running job stands: the stacks of its threads, or where it awaits."""
    number = job_id(id)
    with common.reading() as operator:
        told = operator.stack(number, patience_s=wait)
    if common.as_json:
        common.show.json(None if told is None else {"job": number, "at": views.instant(told.at), "stack": told.message})
    elif told is not None:
        for line in told.message.rstrip().splitlines():
            common.show.quote(Cell(line), 0)
    if told is None:
        common.show.note(
            f"Job {number} does not run, or its worker did not answer within {wait:g}s: it may be frozen, or cannot "
            f"hear the bell. `unstuck doctor {number}` tells which."
        )
        raise typer.Exit(NOT_TOLD)
