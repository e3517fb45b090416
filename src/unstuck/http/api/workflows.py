"""Workflows: start one from a description, look at them, take them up again, give them up."""

from collections.abc import Sequence
from typing import Annotated

import msgspec
from fastapi import Depends, Query, Response

from unstuck.client.enqueue import load_tasks
from unstuck.client.operator import Operator
from unstuck.client.operator.jobs import PAGE
from unstuck.client.views import workflow_summary, workflow_view
from unstuck.client.workflows.builder import refuse_key_of_job
from unstuck.client.workflows.description import NodeDescription, build
from unstuck.domain.api_tokens import Caller, Scope
from unstuck.domain.workflows import WorkflowState
from unstuck.http.api.enqueue import REPEATED, IdempotencyKey, request_of, used_before
from unstuck.http.auth.callers import JobId, Requires, RequiresJob, mark_of, own_key
from unstuck.http.openapi import json_response
from unstuck.http.problems import Problem
from unstuck.http.routing import api_router
from unstuck.http.schemas import (
    NewNodeBody,
    NewWorkflowBody,
    WorkflowAnswer,
    WorkflowPage,
    WorkflowStored,
    WorkflowView,
)
from unstuck.http.services import ServicesDep

router = api_router("workflows", "/workflows")

Reader = Annotated[Caller, Depends(Requires(Scope.READ))]
Enqueuer = Annotated[Caller, Depends(Requires(Scope.ENQUEUE))]
Onlooker = Annotated[Caller, Depends(RequiresJob(Scope.READ))]
Changer = Annotated[Caller, Depends(RequiresJob(Scope.OPERATE))]
_THERE = {"model": WorkflowStored, "description": "It was there already: sent again, or `unique_key` is in use."}


@router.get("", summary="List workflows, newest first", response_model=WorkflowPage)
def workflows(
    services: ServicesDep,
    caller: Reader,
    state: WorkflowState | None = None,
    before: Annotated[
        int | None, Query(ge=1, le=2**63 - 1, description="Older than this one: `next` of the page before.")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=PAGE)] = 100,
) -> Response:
    """Without their nodes, but with how many of them are in which state."""
    found = services.ledger.workflows.list(None if state is None else state.value, before, limit + 1)
    next_before = found[limit - 1].id if len(found) > limit else None
    return json_response({"workflows": [workflow_summary(one) for one in found[:limit]], "next": next_before})


@router.post("", summary="Start a workflow", status_code=201, response_model=WorkflowStored, responses={200: _THERE})
def start(
    body: NewWorkflowBody, services: ServicesDep, caller: Enqueuer, idempotency_key: IdempotencyKey = None
) -> Response:
    """Store a workflow with the jobs of those nodes that wait for nobody; it is durable when the answer comes.
    Tasks are those that living or past workers know. Its result comes from `/jobs/{id}/result`."""
    new = build(
        services.runtime,
        load_tasks(services.ledger),
        body.name,
        described(body.nodes),
        result=body.result,
        unique_key=body.unique_key,
        priority=body.priority,
        by=mark_of(caller),
    )
    root = msgspec.structs.replace(new.root, unique_key=own_key(caller, new.root.unique_key))
    new = msgspec.structs.replace(new, root=root)
    repeated = False
    if idempotency_key is None:
        stored = services.ledger.workflows.begin(new)
    else:
        once = services.ledger.workflows.begin_once(request_of(caller, idempotency_key, "workflow", body), new)
        if not once.stored:
            raise used_before()
        [stored], repeated = once.stored, once.repeated
    refuse_key_of_job(services.ledger, stored, body.unique_key)
    jobs = [node.job for node in new.nodes if node.job is not None]
    warnings = [
        warning for warning in services.runtime.services().no_worker_check.warnings(jobs) if warning is not None
    ]
    view = {
        "id": stored.job_id,
        "name": body.name,
        "fresh": stored.fresh,
        "warning": warnings[0] if warnings else None,
    }
    headers = {"Location": f"/api/v1/workflows/{stored.job_id}", **(REPEATED if repeated else {})}
    return json_response(view, 201 if stored.fresh and not repeated else 200, headers)


def described(nodes: Sequence[NewNodeBody]) -> list[NodeDescription]:
    """Return the nodes of a body as those that a workflow is built from."""
    return [
        NodeDescription(
            node.name,
            node.task,
            node.args,
            node.kwargs,
            node.map,
            node.after,
            node.on_error,
            None if node.nodes is None else described(node.nodes),
            node.result,
        )
        for node in nodes
    ]


@router.get("/{job_id}", summary="A workflow with its nodes", response_model=WorkflowView)
def show(job_id: JobId, services: ServicesDep, caller: Onlooker) -> Response:
    """Nodes in order of dependency, who waits for whom, what failed, and what can be done."""
    return json_response(workflow_view(services.operator(caller).workflows.get(job_id)))


@router.post("/{job_id}/retry", summary="Take a workflow up again from what failed", response_model=WorkflowAnswer)
def retry(job_id: JobId, services: ServicesDep, caller: Changer) -> Response:
    """What succeeded is kept. 409 where it goes on, or succeeded."""
    operator = services.operator(caller)
    operator.workflows.get(job_id)
    return _said(operator, job_id, operator.workflows.retry(job_id), "retried")


@router.post("/{job_id}/resume", summary="Go on past what is paused", response_model=WorkflowAnswer)
def resume(job_id: JobId, services: ServicesDep, caller: Changer) -> Response:
    """Those who depend on what failed get its error. 409 where it is not paused."""
    operator = services.operator(caller)
    operator.workflows.get(job_id)
    return _said(operator, job_id, operator.workflows.resume(job_id), "resumed")


@router.post("/{job_id}/cancel", summary="Give a workflow up", response_model=WorkflowAnswer)
def cancel(job_id: JobId, services: ServicesDep, caller: Changer) -> Response:
    """What was not begun is cancelled, what runs is told to stop. 409 where it has ended already."""
    operator = services.operator(caller)
    return _said(operator, job_id, operator.workflows.cancel(job_id), "cancelled")


def _said(operator: Operator, workflow_id: int, done: bool, word: str) -> Response:
    if done:
        return json_response({"id": workflow_id, "answer": word})
    state = operator.workflows.get(workflow_id).state.value
    raise Problem(409, f"not_{word}", f"Nothing was done to workflow {workflow_id}: it is {state}.", state=state)
