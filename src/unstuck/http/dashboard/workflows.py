"""Workflows: a list of them, and one with its nodes drawn in order, live, with what failed in words beside it."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse

from unstuck.client.operator.jobs import MAX_JOB_ID
from unstuck.client.workflows.outline import ORDER, Item, outline, root_failures
from unstuck.client.workflows.text import error_text, headline, hints, summary, waits_for
from unstuck.domain.api_tokens import Caller, Scope
from unstuck.domain.workflows import WorkflowState
from unstuck.errors import WorkflowNotFound
from unstuck.http.auth.callers import Requires
from unstuck.http.dashboard.graph import draw
from unstuck.http.dashboard.pages import Page, View
from unstuck.http.dashboard.rendering import render
from unstuck.ledger.contract.workflows import WorkflowRecord

PAGE = 50
MEMBERS_LISTED = 20
"""Of a map so many members are listed, those that went wrong first."""
MAX_LISTED = 500
MAX_BLAMED = 5
_NOTABLE = ("failed", "quarantined", "paused", "running", "claimed", "pending")

router = APIRouter()


def workflows_data(viewing: View, key: str) -> dict[str, Any]:
    """`key` is the state that is asked for and the one to begin after: `failed~4711`."""
    state, _, before = key.partition("~")
    known = [one.value for one in WorkflowState]
    before_id = int(before) if before.isdecimal() and 0 < int(before) <= MAX_JOB_ID else None
    state = state if state in known else ""
    found = viewing.services.ledger.workflows.list(state or None, before_id, PAGE + 1)
    return {
        "workflows": [
            {"record": one, "summary": summary({word: one.counts[word] for word in ORDER if word in one.counts})}
            for one in found[:PAGE]
        ],
        "states": known,
        "state": state,
        "first": before_id is None,
        "next_before": found[PAGE - 1].id if len(found) > PAGE else None,
    }


def workflow_data(viewing: View, key: str) -> dict[str, Any]:
    if not key.isdecimal() or len(key) > 19:
        raise WorkflowNotFound(f"There is no workflow {key!r}.")
    workflow = viewing.operator().workflows.get(int(key))
    whole = outline(workflow)
    rows: list[dict[str, Any]] = []
    for item in whole.items:
        _add_row(item, 0, rows, whole.nodes)
    # One drawing for all who look: what changes by the second is written by clocks, not into it.
    at = workflow.finished_at or viewing.snapshot().at
    return {
        "workflow": workflow,
        "headline": headline(workflow),
        "next": _next(workflow),
        "hints": hints(workflow),
        "blamed": [{"node": node, "error": error_text(node)} for node in root_failures(workflow)[:MAX_BLAMED]],
        "tallies": whole.counts,
        "drawing": draw(whole, at),
        "rows": rows[:MAX_LISTED],
        "left_out": max(0, len(rows) - MAX_LISTED),
        "may_retry": workflow.state in (WorkflowState.FAILED, WorkflowState.CANCELLED, WorkflowState.PAUSED),
        "may_resume": workflow.state is WorkflowState.PAUSED,
        "may_cancel": workflow.finished_at is None,
    }


def _next(workflow: WorkflowRecord) -> str:
    if workflow.finished_at is None:
        return waits_for(workflow)
    if workflow.state is WorkflowState.SUCCEEDED:
        return "Nothing: it is done."
    return "Nothing by itself: it has ended, and goes on only if somebody takes it up again."


def _add_row(item: Item, depth: int, rows: list[dict[str, Any]], nodes: dict[int, Any]) -> None:
    node = item.node
    shown = _members(item)
    rows.append(
        {
            "item": item,
            "node": node,
            "depth": depth,
            "after": [nodes[place].name for place in item.after if place in nodes],
            "error": error_text(node),
            "summary": summary(item.counts) if item.counts else "",
            "left_out": len(item.inside) - len(shown),
        }
    )
    for one in shown:
        _add_row(one, depth + 1, rows, nodes)


def _members(item: Item) -> list[Item]:
    if item.node.kind != "map" or len(item.inside) <= MEMBERS_LISTED:
        return list(item.inside)
    order = {state: at for at, state in enumerate(_NOTABLE)}
    return sorted(item.inside, key=lambda one: order.get(one.state, len(order)))[:MEMBERS_LISTED]


WORKFLOWS_PAGE = Page("workflows", "workflows.html", workflows_data, {"workflow-rows": "workflows/rows.html"})
WORKFLOW_PAGE = Page("workflow", "workflow.html", workflow_data, {"workflow": "workflows/one.html"})


@router.get("/workflows")
def workflows(
    request: Request,
    caller: Annotated[Caller, Depends(Requires(Scope.READ))],
    state: Annotated[str, Query(max_length=20)] = "",
    before: Annotated[int | None, Query(ge=1, le=MAX_JOB_ID)] = None,
) -> HTMLResponse:
    viewing: View = request.app.state.view
    key = f"{state}~{before or ''}"
    return render(
        request, WORKFLOWS_PAGE.template, room=WORKFLOWS_PAGE.name, key=key, **WORKFLOWS_PAGE.values(viewing, key)
    )


@router.get("/workflows/{workflow_id}")
def workflow(
    request: Request, workflow_id: str, caller: Annotated[Caller, Depends(Requires(Scope.READ))]
) -> HTMLResponse:
    viewing: View = request.app.state.view
    values = WORKFLOW_PAGE.values(viewing, workflow_id)
    return render(request, WORKFLOW_PAGE.template, room=WORKFLOW_PAGE.name, key=workflow_id, **values)
