"""Look at workflows and take them up again: `workflow ID` draws one, `workflows` lists, retries, resumes, cancels."""

import sys
import time
from typing import Annotated

import typer

from unstuck.cli.common import Common, Misuse, command, job_id
from unstuck.cli.drawing import draw
from unstuck.cli.jobs import MAX_LISTED
from unstuck.cli.show import Cell, Column, Show, ago, confirm, count, state_cell, took
from unstuck.client.flow.outline import ORDER
from unstuck.client.flow.views import workflow_summary, workflow_view
from unstuck.client.flow.words import summary
from unstuck.client.operator import PAGE, Operator
from unstuck.domain.names import did_you_mean
from unstuck.domain.workflow import WorkflowState
from unstuck.store.records import WorkflowRecord

Id = Annotated[str, typer.Argument(metavar="ID", help="The workflow's number.")]
State = Annotated[str | None, typer.Option("--state", metavar="STATE", help="Only those in this state.")]
Limit = Annotated[int, typer.Option("--limit", metavar="N", min=1, max=MAX_LISTED, help="At most so many.")]
Whole = Annotated[bool, typer.Option("--all", help="Every member of large maps too.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


@command()
def workflow(common: Common, id: Id, all: Whole = False) -> None:
    """Draw a workflow with the states and times of its nodes, and what failed."""
    number = job_id(id)
    with common.reading() as operator:
        found = operator.known_workflow(number)
    if common.as_json:
        common.show.json(workflow_view(found))
    else:
        draw(common.show, found, whole=all)


@command()
def workflows(common: Common, ctx: typer.Context, state: State = None, limit: Limit = 100) -> None:
    """List workflows, take them up again, go past what is paused, give them up."""
    if ctx.invoked_subcommand is None:
        _list(common, state, limit)


@command()
def list_workflows(common: Common, state: State = None, limit: Limit = 100) -> None:
    """List workflows, newest first."""
    _list(common, state, limit)


def _list(common: Common, state: str | None, limit: int) -> None:
    known = [one.value for one in WorkflowState]
    if state is not None and state.lower() not in known:
        raise Misuse(
            f"There is no such state of a workflow: {state!r}.{did_you_mean(state, known)} States: {', '.join(known)}."
        )
    with common.reading() as operator:
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
        page = operator.workflows(state, found[-1].id if found else None, size)
        found += page
        if len(page) < size:
            break
    return found


def _table(show: Show, found: list[WorkflowRecord]) -> None:
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
def retry(common: Common, id: Id) -> None:
    """Take a workflow up again from what failed; what succeeded is kept."""
    number = job_id(id)
    with common.reading() as operator:
        before = operator.known_workflow(number)
        done = operator.retry_workflow(number)
    why = f"it is {before.state}; only one that failed, was cancelled or is paused can be taken up again"
    _tell(common, number, done, "retried", f"Workflow {number} goes on from what failed.", why)


@command()
def resume(common: Common, id: Id) -> None:
    """Go on past what is paused: those who depend on it get its error."""
    number = job_id(id)
    with common.reading() as operator:
        before = operator.known_workflow(number)
        done = operator.resume_workflow(number)
    why = f"it is {before.state}, not paused"
    _tell(common, number, done, "resumed", f"Workflow {number} goes on past what failed.", why)


@command()
def cancel(common: Common, id: Id, yes: Yes = False) -> None:
    """Give a workflow up: what was not begun is cancelled, what runs is told to stop."""
    number = job_id(id)
    with common.reading() as operator:
        before = operator.known_workflow(number)
        if before.finished_at is None and not yes:
            _confirm(before)
        done = operator.cancel_workflow(number)
    said = f"Workflow {number} is cancelled; what runs of it is told to stop."
    _tell(common, number, done, "cancelled", said, f"it has ended already: {before.state}")


def _confirm(workflow: WorkflowRecord) -> None:
    if not sys.stdin.isatty():
        return
    confirm(f"Cancel workflow {workflow.id} ({workflow.name})?")


def _tell(common: Common, number: int, done: bool, word: str, said: str, why: str) -> None:
    if common.as_json:
        common.show.json({"id": number, word: done})
    elif done:
        common.show.say(said, "green")
    else:
        common.show.note(f"Nothing was done to workflow {number}: {why}.")
    if not done:
        raise typer.Exit(1)
