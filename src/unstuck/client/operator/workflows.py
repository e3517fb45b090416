"""Look at workflows, take them up again, go on past what is paused."""

from unstuck.client.operator.audit import Verbs
from unstuck.client.operator.jobs import MAX_JOB_ID
from unstuck.client.views import View, node_view
from unstuck.domain.states import HELD_STATES
from unstuck.errors import WorkflowNotFound
from unstuck.ledger.contract.workflows import WorkflowRecord


class WorkflowVerbs(Verbs):
    """A part of the operator's verbs."""

    def workflow(self, workflow_id: int) -> WorkflowRecord | None:
        """Give a workflow with its nodes."""
        return self._ledger.workflow(workflow_id)

    def known_workflow(self, workflow_id: int) -> WorkflowRecord:
        """Give a workflow that must be there, with its nodes."""
        found = self._ledger.workflow(workflow_id) if 0 < workflow_id <= MAX_JOB_ID else None
        if found is None:
            raise WorkflowNotFound(self._who_is(workflow_id))
        return found

    def place_in_workflow(self, job_id: int) -> View | None:
        """Give which node of which workflow a job is, as plain values; None for most jobs."""
        placed = self._ledger.place_of(job_id)
        found = None if placed is None else self._ledger.workflow(placed[0])
        return None if placed is None or found is None else node_view(found, placed[1])

    def _who_is(self, workflow_id: int) -> str:
        place = self._ledger.place_of(workflow_id) if 0 < workflow_id <= MAX_JOB_ID else None
        if place is not None:
            return f"Job {workflow_id} is no workflow, but a node of one: `unstuck workflow {place[0]}` draws it."
        return (
            f"Workflow {workflow_id} does not exist: it was never stored, or was pruned after it ended. "
            "`unstuck workflows` lists those there are."
        )

    def workflows(
        self, state: str | None = None, before_id: int | None = None, limit: int = 100
    ) -> list[WorkflowRecord]:
        """Give workflows, newest first, without their nodes."""
        return self._ledger.workflows(state, before_id, limit)

    def retry_workflow(self, workflow_id: int, by: str | None = None) -> bool:
        """Take up a workflow that failed, was cancelled or is paused, from what failed."""
        by = by or self._by
        with self._audit.record(by, "retry workflow", f"workflow {workflow_id}") as note:
            done = self._ledger.retry_workflow(workflow_id, by)
            note.outcome = "taken up again" if done else "nothing to take up"
        return done

    def resume_workflow(self, workflow_id: int, by: str | None = None) -> bool:
        """Go on past what is paused."""
        by = by or self._by
        with self._audit.record(by, "resume workflow", f"workflow {workflow_id}") as note:
            done = self._ledger.resume_workflow(workflow_id, by)
            note.outcome = "resumed" if done else "not paused"
        return done

    def cancel_workflow(self, workflow_id: int, by: str | None = None) -> bool:
        """Give a workflow up: what was not begun is cancelled, what runs is told to stop. False where it had ended."""
        by = by or self._by
        before = self.known_workflow(workflow_id)
        with self._audit.record(by, "cancel workflow", f"workflow {workflow_id}") as note:
            done = self._ledger.cancel([workflow_id], by).get(workflow_id) in ("cancelled", "requested")
            note.outcome = "cancelled" if done else "ended already"
        if done and any(node.job_state in HELD_STATES for node in before.nodes):
            self._ring({f"worker:{worker.id}" for worker in self._ledger.workers(living_only=True)})
        return done
