"""Record how attempts end at runners: the outcome for the next turn, the log line and the metrics."""

from collections.abc import Sequence

from unstuck import host
from unstuck.domain.autopsy import Autopsy
from unstuck.domain.endings import Cancelled, Died, Outcome, Raised, Succeeded, conclude
from unstuck.ledger.contract.workers import FollowUp, Output, Success
from unstuck.runner.journal import checkpoint_entry
from unstuck.worker.deaths import explain, of_stop
from unstuck.worker.fork_client import RunnerExit
from unstuck.worker.held_jobs import HeldJob
from unstuck.worker.job_metrics import JobMetrics
from unstuck.worker.journal import written
from unstuck.worker.outbox import Outbox
from unstuck.worker.outcome_log import OutcomeLog
from unstuck.worker.runner_process import Finished
from unstuck.worker.slots import Slot


class OutcomeRecorder:
    """Used in the thread of the worker loop alone."""

    def __init__(self, outbox: Outbox, metrics: JobMetrics) -> None:
        self.metrics = metrics
        self.log = OutcomeLog()
        self.processed = 0
        """Attempts whose code came to an end by itself."""
        self._ended = 0
        self._outbox = outbox

    def take_ended(self) -> int:
        """Return how many attempts ended since the last call."""
        ended, self._ended = self._ended, 0
        return ended

    def ended(self, slot: Slot, held_job: HeldJob, item: Finished, ran_s: float) -> None:
        """Record what a runner reported of a job."""
        job, outcome, outbox = held_job.job, item.outcome, self._outbox
        if item.checkpoint:
            outbox.put_entry(written(held_job, checkpoint_entry(item.checkpoint)))
        if item.entry is not None:
            outbox.put_entry(written(held_job, item.entry))
        if item.follow:
            outbox.follow[job.token] = [FollowUp(job.job_id, job.token, one) for one in item.follow]
        if isinstance(outcome, Succeeded):
            outbox.done.append(Success(job.job_id, job.token, outcome.result))
        else:
            ending = conclude(held_job.attempt(), _unsuccessful(slot, held_job, item, ran_s))
            outbox.endings.append(ending)
            self.log.ended(job, ending, host.boottime_s())
        if held_job.stop is not None and slot.shared and all(other.stop is None for other in slot.jobs.values()):
            slot.runner.stacks.forget()
        if item.stdout or item.stderr:
            outbox.put_output(Output(job.job_id, job.token, item.stdout, item.stderr))
        self.processed += 1
        self._ended += 1

    def died(
        self,
        slot: Slot,
        held_job: HeldJob,
        exit: RunnerExit,
        died: Died,
        death: Autopsy,
        company: Sequence[HeldJob],
        now_s: float,
    ) -> None:
        """Record that a runner died in a job; `company` are the jobs that had begun in it."""
        job = held_job.job
        began_s = held_job.sent_s if slot.is_async else slot.job_started_s
        ran_s = now_s - began_s
        self.metrics.ran(held_job, began_s, ran_s)
        outcome = held_job.stop.outcome if held_job.stop else died
        outcome = explain(outcome, death, held_job, ran_s, [other.job.job_id for other in company])
        ending = conclude(held_job.attempt(), outcome)
        self._outbox.endings.append(ending)
        if held_job.stop is None:
            self.log.runner_died(job, ending, exit.cause, exit.pid or slot.runner.pid, now_s)
        else:
            self.log.ended(job, ending, now_s)
        if not slot.shared:
            stdout, stderr = slot.runner.last_output()
            self._outbox.put_output(Output(job.job_id, job.token, stdout, stderr))
        # Not counted as processed: nothing was done.
        self._ended += 1

    def cancelled_unbegun(self, held_job: HeldJob, outcome: Cancelled) -> None:
        """Record that a job was cancelled before any runner entered it."""
        self.metrics.never_began(held_job)
        self._outbox.endings.append(conclude(held_job.attempt(), outcome))


def _unsuccessful(slot: Slot, held_job: HeldJob, item: Finished, ran_s: float) -> Outcome:
    """Return what an end without success means: if we stopped the job, what it raised is our doing."""
    if held_job.stop is not None and isinstance(item.outcome, Cancelled | Raised):
        return explain(held_job.stop.outcome, of_stop(slot, item), held_job, ran_s)
    if isinstance(item.outcome, Cancelled):
        return Raised("CancelledError", "The task cancelled itself", "")
    return item.outcome
