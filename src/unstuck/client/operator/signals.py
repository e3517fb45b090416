"""Send signals to jobs, and read what jobs wrote down on their way."""

from unstuck.client.auditing import jobs_named
from unstuck.client.operator.base import Verbs
from unstuck.client.operator.limits import MAX_JOB_ID
from unstuck.domain.errors import JobNotFound, SignalRefused
from unstuck.domain.journal import MAX_SIGNALS, checked_name
from unstuck.store.records import JournalRecord, SignalRecord


class SignalVerbs(Verbs):
    """A part of the operator's verbs."""

    def signal(self, job_id: int, name: str, value: bytes = b"null", by: str | None = None) -> str:
        """Send a signal with its value (JSON) to a job: 'woken' (it waited for it) or 'kept' (until it does)."""
        by = by or self._by
        checked_name(name, "signal")
        answer = "missing"
        if 0 < job_id <= MAX_JOB_ID:
            with self._audit.note(by, "signal", f"{jobs_named([job_id])}: {name}") as note:
                answer = note.outcome = self._ledger.signal(job_id, name, value, by)
        if answer == "missing":
            raise JobNotFound(f"Job {job_id} does not exist: it was never stored, or was pruned after it ended.")
        if answer == "finished":
            raise SignalRefused(f"Job {job_id} has ended, so nobody would take the signal {name!r}.")
        if answer == "workflow":
            raise SignalRefused(
                f"Job {job_id} stands for a workflow, and takes no signals. Send it to the job of a node "
                f"(`unstuck workflow {job_id}` shows them)."
            )
        if answer == "full":
            raise SignalRefused(
                f"{MAX_SIGNALS:,} signals wait for job {job_id} already. Send more when it has taken some "
                f"(`unstuck why {job_id}` says what it is doing)."
            )
        return answer

    def journal(self, job_id: int) -> list[JournalRecord]:
        """Give what a job wrote down, in order; its checkpoint, if there is one, comes first."""
        return self._ledger.journal(job_id)

    def signals(self, job_id: int) -> list[SignalRecord]:
        """Give the signals that a job was sent, oldest first."""
        return self._ledger.signals(job_id)
