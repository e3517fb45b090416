"""`Operator`: look at a ledger and act on it. Each of its parts has a module in this package."""

import time
from collections.abc import Sequence

from unstuck.client.doctor.examine import examine, examine_job
from unstuck.client.doctor.facts import Thresholds, gather
from unstuck.client.doctor.findings import Finding
from unstuck.client.metrics import MAX_MINUTES, SERIES, Minute, activity
from unstuck.client.operator.access import Access
from unstuck.client.operator.audit import AuditLog, whoami
from unstuck.client.operator.jobs import Jobs
from unstuck.client.operator.queues import Queues
from unstuck.client.operator.schedules import Schedules
from unstuck.client.operator.stale import StaleJobs
from unstuck.client.operator.workers import Workers
from unstuck.client.operator.workflows import Workflows
from unstuck.client.reasons import JobContext, describe, explain_wait, gather_context
from unstuck.client.why import story
from unstuck.client.why.story import Story
from unstuck.client.why.tell import tell
from unstuck.client.workflows.outline import active_nodes
from unstuck.config import Settings
from unstuck.domain.states import FINAL_STATES
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.jobs import JobRecord
from unstuck.ledger.contract.queues import QueueRecord
from unstuck.ledger.contract.workers import WorkerRecord
from unstuck.ledger.contract.workflows import WorkflowRecord

NODES_LOOKED_AT = 3


class Operator:
    """Everything that an operator can look at or do.

    `by` is the operator's name in events, causes and the audit log. `via` is the way they came: cli, http, page or
    python."""

    def __init__(self, ledger: Ledger, settings: Settings, by: str | None = None, via: str = "python") -> None:
        audit = AuditLog(ledger, by or whoami(), via)
        self.ledger = ledger
        self._settings = settings
        self.jobs = Jobs(ledger, settings, audit)
        self.queues = Queues(ledger, audit)
        self.workers = Workers(ledger, audit)
        self.schedules = Schedules(ledger, settings, audit)
        self.workflows = Workflows(ledger, audit)
        self.stale = StaleJobs(ledger, audit)
        self.access = Access(ledger, audit)

    def why(
        self,
        job_id: int,
        *,
        workers: Sequence[WorkerRecord] | None = None,
        queues: Sequence[QueueRecord] | None = None,
    ) -> Story:
        """Return the story of a job in plain words: what happened, by which rule, what comes next, what to do.

        Pass `workers` and `queues` if you have just read them: counting what waits may take a moment."""
        record = self.jobs.get(job_id)
        return tell(story.gather(self.ledger, record, self._context(record, workers, queues)))

    def explain_wait(self, job_id: int) -> str | None:
        """Return why a job makes no progress; None if it is finished or runs as it should."""
        record = self.jobs.get(job_id)
        return explain_wait(record, self._context(record))

    def doing(self, job_id: int) -> str:
        """Return what a job is doing, in one sentence."""
        record = self.jobs.get(job_id)
        return describe(record, self._context(record))

    def activity(self, minutes: int = 60) -> list[Minute]:
        """Return what happened in each of the last minutes, oldest first; the last one is not over yet."""
        until = int(time.time() // 60) + 1
        since = until - max(1, min(minutes, MAX_MINUTES))
        return activity(self.ledger.admin.counter_series(SERIES, since), since, until)

    def doctor(self, limits: Thresholds | None = None) -> list[Finding]:
        """Check the whole system: what is wrong, why, and how to fix it; the worst first.

        Takes a moment longer if a worker seems to do nothing: it is looked at twice."""
        return examine(gather(self.ledger, self._settings, limits), limits)

    def doctor_job(self, job_id: int) -> list[Finding]:
        """Check one job: why it does not run, or how it runs or ended, and what to do."""
        record = self.jobs.get(job_id)
        findings = [] if record.state in FINAL_STATES else examine(gather(self.ledger, self._settings, about=record))
        context = self._context(record)
        found = examine_job(record, context, findings)
        if context.own_workflow is not None:
            found += self._examine_nodes(context.own_workflow)
        return found

    def _examine_nodes(self, workflow: WorkflowRecord) -> list[Finding]:
        """Check the first few nodes that a workflow waits for."""
        found = []
        for node in active_nodes(workflow)[:NODES_LOOKED_AT]:
            record = self.ledger.jobs.get(node.job_id) if node.job_id is not None else None
            if record is not None:
                found += examine_job(record, self._context(record))
        return found

    def _context(
        self,
        job: JobRecord,
        workers: Sequence[WorkerRecord] | None = None,
        queues: Sequence[QueueRecord] | None = None,
    ) -> JobContext:
        return gather_context(self.ledger, self._settings.recovery.rules, job, workers=workers, queues=queues)
