"""A handle on a workflow that was started: wait for it, look at its nodes, take it up again."""

from typing import Any

from unstuck.client.job import Job
from unstuck.domain.errors import DuplicateJob, JobNotFound, UnknownName
from unstuck.domain.names import did_you_mean
from unstuck.domain.workflow import TASK
from unstuck.store.contract import Ledger
from unstuck.store.records import Enqueued, WorkflowRecord


def refuse_key_of_job(ledger: Ledger, stored: Enqueued, key: str | None) -> None:
    """Raise DuplicateJob if the key of a workflow belongs to an ordinary job: nothing was started, and that job would
    be taken for a workflow."""
    found = None if stored.fresh else ledger.job(stored.job_id)
    if found is not None and found.task != TASK:
        raise DuplicateJob(stored.job_id, key)


class WorkflowRun(Job[Any]):
    """The job that stands for a workflow: `result()`, `cancel()` and `events()` mean the whole of it."""

    def __repr__(self) -> str:
        return f"<WorkflowRun {self.id}>"

    def look(self) -> WorkflowRecord:
        """Give the workflow with all of its nodes as they are now."""
        found = self._counter.parts().ledger.workflow(self.id)
        if found is None:
            raise JobNotFound(f"Workflow {self.id} does not exist: it was never stored, or was pruned after it ended.")
        return found

    def job(self, name: str) -> Job[Any]:
        """Give the job of the node of this name."""
        nodes = {node.name: node for node in self.look().nodes}
        if name not in nodes:
            raise UnknownName(f"Workflow {self.id} has no node {name!r}.{did_you_mean(name, nodes)}")
        job_id = nodes[name].job_id
        if job_id is None:
            raise UnknownName(f"Node {name!r} of workflow {self.id} has no job yet: it is {nodes[name].state.value}.")
        return Job(self._counter, job_id)

    def retry(self) -> bool:
        """Take it up again from what failed, was cancelled or is paused; False where there is nothing to take up."""
        return self._counter.parts().operator.retry_workflow(self.id, by="client")

    def resume(self) -> bool:
        """Go on past what is paused: those who depend on it get its error. False where it is not paused."""
        return self._counter.parts().operator.resume_workflow(self.id, by="client")
