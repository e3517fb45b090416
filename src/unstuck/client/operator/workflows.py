"""Look at workflows, take them up again, go on past what is paused."""

from unstuck.client.operator.base import Verbs
from unstuck.store.records import WorkflowRecord


class WorkflowVerbs(Verbs):
    """A part of the operator's verbs."""

    def workflow(self, workflow_id: int) -> WorkflowRecord | None:
        """Give a workflow with its nodes."""
        return self._ledger.workflow(workflow_id)

    def workflows(
        self, state: str | None = None, before_id: int | None = None, limit: int = 100
    ) -> list[WorkflowRecord]:
        """Give workflows, newest first, without their nodes."""
        return self._ledger.workflows(state, before_id, limit)

    def retry_workflow(self, workflow_id: int, by: str | None = None) -> bool:
        """Take up a workflow that failed, was cancelled or is paused, from what failed."""
        by = by or self._by
        with self._audit.note(by, "retry workflow", f"workflow {workflow_id}") as note:
            done = self._ledger.retry_workflow(workflow_id, by)
            note.outcome = "taken up again" if done else "nothing to take up"
        return done

    def resume_workflow(self, workflow_id: int, by: str | None = None) -> bool:
        """Go on past what is paused."""
        by = by or self._by
        with self._audit.note(by, "resume workflow", f"workflow {workflow_id}") as note:
            done = self._ledger.resume_workflow(workflow_id, by)
            note.outcome = "resumed" if done else "not paused"
        return done
