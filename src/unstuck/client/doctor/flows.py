"""Find workflows that wait for an operator."""

from collections.abc import Iterator

from unstuck.client.doctor.codes import Code
from unstuck.client.doctor.facts import Facts, Limits
from unstuck.client.doctor.finding import Finding, warning
from unstuck.client.flow.outline import paused_nodes
from unstuck.client.flow.words import waits_for
from unstuck.store.diagnosis import Diagnosis
from unstuck.store.records import WorkflowRecord


def check_workflows(facts: Facts, _diagnosis: Diagnosis, _limits: Limits) -> Iterator[Finding]:
    yield from (workflow_paused(workflow) for workflow in facts.paused)


def workflow_paused(workflow: WorkflowRecord) -> Finding:
    return warning(
        Code.WORKFLOW_PAUSED,
        f"Workflow {workflow.id} ({workflow.name}) is paused",
        waits_for(workflow),
        f"`unstuck workflows retry {workflow.id}` tries it again, `unstuck workflows resume {workflow.id}` goes on "
        f"past it, `unstuck workflows cancel {workflow.id}` gives it up.",
        workflow=workflow.id,
        name=workflow.name,
        nodes=[node.name for node in paused_nodes(workflow)],
    )
