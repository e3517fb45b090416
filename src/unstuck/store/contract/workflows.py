"""What is asked of workflows. That they move on when a job ends is part of ending it, whoever does that."""

from collections.abc import Sequence
from typing import Any, Protocol

from unstuck.store.records import Enqueued, NewWorkflow, OnceAnswer, Repaired, Request, WorkflowRecord


class WorkflowVerbs(Protocol):
    def begin_workflow(self, workflow: NewWorkflow) -> Enqueued:
        """Store a workflow and the jobs of those nodes that wait for nobody, all or none. Repeats itself safely."""
        ...

    def begin_workflow_on(self, connection: Any, workflow: NewWorkflow) -> Enqueued:
        """Store a workflow inside the caller's own transaction; nothing is committed here."""
        ...

    def begin_workflow_once(self, request: Request, workflow: NewWorkflow) -> OnceAnswer:
        """The same, unless a request with this key did so before, also where that workflow has ended."""
        ...

    def workflow(self, workflow_id: int) -> WorkflowRecord | None:
        """Give a workflow with its nodes, in the order of their places."""
        ...

    def workflows(
        self, state: str | None = None, before_id: int | None = None, limit: int = 100
    ) -> list[WorkflowRecord]:
        """Give workflows without their nodes, the newest first."""
        ...

    def place_of(self, job_id: int) -> tuple[int, int] | None:
        """Give the workflow that a job belongs to, and its place there (0: it stands for it); None for most jobs."""
        ...

    def inputs(self, job_ids: Sequence[int]) -> dict[int, bytes]:
        """Give for jobs that are nodes how those ended that they need, packed as `domain.inputs` does."""
        ...

    def retry_workflow(self, workflow_id: int, by: str) -> bool:
        """Take up a workflow that failed, was cancelled or is paused: what failed is tried again, what was not begun
        may begin. False where there is none, or it goes on or succeeded."""
        ...

    def resume_workflow(self, workflow_id: int, by: str) -> bool:
        """Go on past what is paused: those who depend on it get its error. False where it is not paused."""
        ...

    def repair_workflows(self, limit: int) -> list[Repaired]:
        """Find what should be impossible, repair it by the same ways as always, and say so."""
        ...
