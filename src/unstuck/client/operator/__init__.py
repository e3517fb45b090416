"""`Operator`: everything an operator can look at or do. Each part has a module in this package."""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from unstuck.client import views
from unstuck.client.doctor import facts as doctors_facts
from unstuck.client.doctor.examine import examine, examine_job
from unstuck.client.doctor.facts import Thresholds
from unstuck.client.doctor.findings import Finding
from unstuck.client.metrics import MAX_MINUTES, SERIES, Minute, activity
from unstuck.client.operator.access import AdmittingVerbs
from unstuck.client.operator.audit import Verbs
from unstuck.client.operator.jobs import CANCELLED_BY_DEFAULT as CANCELLED_BY_DEFAULT
from unstuck.client.operator.jobs import EVENTS_SHOWN as EVENTS_SHOWN
from unstuck.client.operator.jobs import LOOKED_UP as LOOKED_UP
from unstuck.client.operator.jobs import MAX_JOB_ID as MAX_JOB_ID
from unstuck.client.operator.jobs import MAX_REASON_CHARS as MAX_REASON_CHARS
from unstuck.client.operator.jobs import PAGE as PAGE
from unstuck.client.operator.jobs import (
    PATIENCE_S,
    JobPage,
    JobVerbs,
    QuarantineVerbs,
    SignalVerbs,
    ask_stack,
    fetch_stack,
    search,
)
from unstuck.client.operator.jobs import RETRIED_BY_DEFAULT as RETRIED_BY_DEFAULT
from unstuck.client.operator.queues import QueueVerbs
from unstuck.client.operator.schedules import ScheduleVerbs
from unstuck.client.operator.stale import StaleAction as StaleAction
from unstuck.client.operator.stale import StaleVerbs
from unstuck.client.operator.workers import WorkerVerbs
from unstuck.client.operator.workflows import WorkflowVerbs
from unstuck.client.reasons import JobContext, describe, explain_wait
from unstuck.client.views import node_view
from unstuck.client.why import story as evidence
from unstuck.client.why.story import Story
from unstuck.client.why.tell import tell
from unstuck.client.workflows.outline import active_nodes
from unstuck.domain.bounds import SHOWN_BYTES
from unstuck.domain.conditions import reaper_is_missing
from unstuck.domain.recovery_rules import rules_of_ledger
from unstuck.domain.redaction import Redactor
from unstuck.domain.states import FINAL_STATES, HELD_STATES, JobState
from unstuck.errors import JobNotFound, LedgerError
from unstuck.ledger.contract.diagnosis import Blocker
from unstuck.ledger.contract.events import EventRecord
from unstuck.ledger.contract.jobs import JobFilter, JobRecord, OutputRecord
from unstuck.ledger.contract.queues import QueueRecord
from unstuck.ledger.contract.workers import WorkerRecord
from unstuck.ledger.contract.workflows import WorkflowRecord

NODES_LOOKED_AT = 3
BLOCKING_S = 0.5
"""How old a transaction is at least that is said to keep an outcome from the ledger."""


@dataclass(frozen=True)
class Seen:
    """What somebody saw a moment ago; None: nobody looked."""

    workers: Sequence[WorkerRecord] | None = None
    queues: Sequence[QueueRecord] | None = None


class LookingVerbs(Verbs):
    """A part of the operator's verbs."""

    def job(self, job_id: int) -> JobRecord:
        record = self._ledger.job(job_id) if 0 < job_id <= MAX_JOB_ID else None
        if record is None:
            raise JobNotFound(
                f"Job {job_id} does not exist: it was never stored, or was pruned after it ended. "
                "`unstuck jobs` lists those there are."
            )
        return record

    def job_view(self, job_id: int) -> views.View:
        """Give the whole story of a job as plain values."""
        record = self.job(job_id)
        workers = self._ledger.workers()
        progress = self._ledger.progress([job_id]).get(job_id)
        context = self._surroundings(record, Seen(workers))
        attempts = self._ledger.attempts(job_id)
        return views.job_detail(
            record,
            attempts,
            self._ledger.events(job_id=job_id, limit=EVENTS_SHOWN),
            {worker.id: worker.name for worker in workers},
            explain_wait(record, context),
            Redactor(self._settings.http.redact),
            views.progress_of(record, progress, attempts),
            None if context.flow is None or context.place is None else node_view(context.flow, context.place),
            self._ledger.journal(job_id, SHOWN_BYTES),
            self._ledger.signals(job_id, SHOWN_BYTES),
        )

    def why(self, job_id: int, seen: Seen | None = None) -> Story:
        """Tell the whole story of a job in plain words: what happened, by which rule, what is next, what to do.

        Who looked around just now gives what was `seen`: to count all that waits may take a moment."""
        record = self.job(job_id)
        return tell(evidence.gather(self._ledger, record, self._surroundings(record, seen)))

    def jobs(self, where: JobFilter) -> list[JobRecord]:
        return self._ledger.jobs(where)

    def search(self, where: JobFilter, patience_s: float = PATIENCE_S) -> JobPage:
        """Like `jobs`, but stop after a while and say where to go on: what matches may be rare among millions."""
        return search(self._ledger.jobs, where, patience_s)

    def outputs(self, job_id: int) -> list[OutputRecord]:
        """Return what the tries of a job printed. Of one whose whole worker was killed, the last lines are known."""
        self.job(job_id)
        found = {output.token: output for output in self._ledger.outputs(job_id)}
        attempts = self._ledger.attempts(job_id)
        for attempt in attempts:
            autopsy = attempt.autopsy
            if attempt.token not in found and autopsy is not None and (autopsy.stdout or autopsy.stderr):
                found[attempt.token] = OutputRecord(attempt.token, autopsy.stdout.encode(), autopsy.stderr.encode())
        # Tokens are in no order on PostgreSQL. What was printed by an attempt that was given back comes first.
        place = {attempt.token: number for number, attempt in enumerate(attempts)}
        return sorted(found.values(), key=lambda output: place.get(output.token, -1))

    def events(self, *, after_id: int | None = None, limit: int = 100) -> list[EventRecord]:
        return self._ledger.events(after_id=after_id, limit=limit)

    def workers(self, living_only: bool = False) -> list[WorkerRecord]:
        return self._ledger.workers(living_only)

    def queues(self) -> list[QueueRecord]:
        return self._ledger.queues()

    def activity(self, minutes: int = 60) -> list[Minute]:
        """Say what happened in each of the last minutes, oldest first; the last one is still going on."""
        until = int(time.time() // 60) + 1
        since = until - max(1, min(minutes, MAX_MINUTES))
        return activity(self._ledger.counter_series(SERIES, since), since, until)

    def explain_wait(self, job_id: int) -> str | None:
        """Say why a job is not moving; None when it is finished or runs as it should."""
        record = self.job(job_id)
        return explain_wait(record, self._surroundings(record))

    def doing(self, job_id: int) -> str:
        """Say what a job is doing, in one sentence."""
        record = self.job(job_id)
        return describe(record, self._surroundings(record))

    def ask_stack(self, job_id: int) -> bool:
        """Ask where a running job stands; the answer comes as an event of the job. False where it does not run."""
        return ask_stack(self._ledger, self.job(job_id))

    def stack(self, job_id: int, patience_s: float = 10.0) -> EventRecord | None:
        """Ask where a running job stands and wait for it; None where it does not run, or its worker does not answer."""
        return fetch_stack(self._ledger, self.job(job_id).id, patience_s)

    def doctor(self, limits: Thresholds | None = None) -> list[Finding]:
        """Look at the whole system and say what is wrong, why, and the cure; the worst first.

        Takes a moment longer where a worker seems to do nothing: it is looked at twice."""
        return examine(doctors_facts.gather(self._ledger, self._settings, limits), limits)

    def doctor_job(self, job_id: int) -> list[Finding]:
        """Say why one job is not running, or how it runs or ended, and what to do."""
        record = self.job(job_id)
        findings = [] if record.state in FINAL_STATES else self._doctor_around(record)
        context = self._surroundings(record)
        found = examine_job(record, context, findings)
        if context.own_workflow is not None:
            found += self._doctor_nodes(context.own_workflow)
        return found

    def _doctor_around(self, job: JobRecord) -> list[Finding]:
        return examine(doctors_facts.gather(self._ledger, self._settings, about=job))

    def _doctor_nodes(self, flow: WorkflowRecord) -> list[Finding]:
        """Say how the first few of the nodes do that a workflow waits for."""
        found = []
        for node in active_nodes(flow)[:NODES_LOOKED_AT]:
            record = self._ledger.job(node.job_id) if node.job_id is not None else None
            if record is not None:
                found += examine_job(record, self._surroundings(record))
        return found

    def _surroundings(self, job: JobRecord, seen: Seen | None = None) -> JobContext:
        seen = seen or Seen()
        queue = None
        if job.state not in FINAL_STATES:
            queues = self._ledger.queues() if seen.queues is None else seen.queues
            queue = next((queue for queue in queues if queue.name == job.queue), None)
        workers = self._ledger.workers() if seen.workers is None else list(seen.workers)
        links, line, limit = None, None, None
        if job.state is JobState.PENDING:
            links = self._ledger.links(job.id)
            if links is not None and links.concurrency_key is not None:
                line = next(iter(self._ledger.concurrency_keys(links.concurrency_key)), None)
            limit = next((one for one in self._ledger.queue_limits() if one.name == job.queue), None)
        placed = self._ledger.place_of(job.id)
        flow = None if placed is None else self._ledger.workflow(placed[0])
        place = None if placed is None or flow is None else placed[1]
        since = None
        if job.state is JobState.WAITING and (attempts := self._ledger.attempts(job.id)):
            since = attempts[-1].ended_at
        deferred = self._ledger.deferred_outcome(job.id) if job.state in HELD_STATES else None
        blockers: tuple[Blocker, ...] = ()
        if deferred is not None:
            # Who it is is good to know, and not needed.
            with suppress(LedgerError):
                blockers = self._ledger.blockers(open_s=BLOCKING_S)
        return JobContext(
            queue,
            workers,
            self._settings.recovery.rules,
            time.time(),
            flow,
            place,
            since,
            links,
            line,
            limit,
            deferred,
            blockers,
            swept=job.state in HELD_STATES and self._is_swept(),
        )

    def _is_swept(self) -> bool:
        """Return whether a reaper did a round lately, in a worker or elsewhere."""
        own = self._settings.recovery.rules
        interval_s = rules_of_ledger(self._ledger.recovery_rules(), own).check_interval_s
        return not reaper_is_missing(self._ledger.fleet().unswept_s, interval_s, ())


class Operator(
    LookingVerbs,
    QuarantineVerbs,
    JobVerbs,
    SignalVerbs,
    StaleVerbs,
    QueueVerbs,
    ScheduleVerbs,
    WorkerVerbs,
    AdmittingVerbs,
    WorkflowVerbs,
):
    """What an operator can do with a ledger. `by` names who did it, in events, causes and the audit log; `door` says
    which way they came: cli, http, page or python."""
