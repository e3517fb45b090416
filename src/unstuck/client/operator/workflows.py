"""Find, retry, resume and cancel workflows."""

from unstuck.client.operator.audit import AuditLog
from unstuck.client.operator.jobs import MAX_JOB_ID
from unstuck.client.views import View, node_view
from unstuck.domain.states import HELD_STATES
from unstuck.errors import WorkflowNotFound
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.workflows import WorkflowRecord


class Workflows:
    """Act on workflows."""

    def __init__(self, ledger: Ledger, audit: AuditLog) -> None:
        self._ledger = ledger
        self._audit = audit

    def get(self, workflow_id: int) -> WorkflowRecord:
        """Return a workflow with its nodes; raise WorkflowNotFound if it does not exist."""
        found = self._ledger.workflows.get(workflow_id) if 0 < workflow_id <= MAX_JOB_ID else None
        if found is None:
            raise WorkflowNotFound(self._not_found(workflow_id))
        return found

    def node_of(self, job_id: int) -> View | None:
        """Return the node that a job is, and its workflow, as plain values; None if it belongs to no workflow."""
        placed = self._ledger.workflows.place_of(job_id)
        found = None if placed is None else self._ledger.workflows.get(placed[0])
        return None if placed is None or found is None else node_view(found, placed[1])

    def retry(self, workflow_id: int) -> bool:
        """Continue a workflow that failed, was cancelled or is paused, from its failed nodes.

        Return whether there was anything to continue."""
        with self._audit.record("retry workflow", f"workflow {workflow_id}") as entry:
            done = self._ledger.workflows.retry(workflow_id, self._audit.by)
            entry.outcome = "taken up again" if done else "nothing to take up"
        return done

    def resume(self, workflow_id: int) -> bool:
        """Continue a paused workflow: nodes after a failed one get its error. Return whether it was paused."""
        with self._audit.record("resume workflow", f"workflow {workflow_id}") as entry:
            done = self._ledger.workflows.resume(workflow_id, self._audit.by)
            entry.outcome = "resumed" if done else "not paused"
        return done

    def cancel(self, workflow_id: int) -> bool:
        """Cancel the nodes that have not begun and stop those that run. Return False if the workflow had ended."""
        before = self.get(workflow_id)
        with self._audit.record("cancel workflow", f"workflow {workflow_id}") as entry:
            answers = self._ledger.jobs.cancel([workflow_id], self._audit.by)
            done = answers.get(workflow_id) in ("cancelled", "requested")
            entry.outcome = "cancelled" if done else "ended already"
        if done and any(node.job_state in HELD_STATES for node in before.nodes):
            self._ledger.notify({f"worker:{worker.id}" for worker in self._ledger.workers.list(living_only=True)})
        return done

    def _not_found(self, workflow_id: int) -> str:
        place = self._ledger.workflows.place_of(workflow_id) if 0 < workflow_id <= MAX_JOB_ID else None
        if place is not None:
            return f"Job {workflow_id} is no workflow, but a node of one: `unstuck workflow {place[0]}` draws it."
        return (
            f"Workflow {workflow_id} does not exist: it was never stored, or was pruned after it ended. "
            "`unstuck workflows` lists those there are."
        )
