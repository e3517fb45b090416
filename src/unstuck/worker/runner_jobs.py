"""The jobs that are RUNNING in the ledger: which of them wait for a runner, and which runner has the others."""

from collections import deque

from unstuck.domain.endings import Cancelled
from unstuck.worker.held_jobs import Begun, HeldJob
from unstuck.worker.outcome_recorder import OutcomeRecorder
from unstuck.worker.slots import Slot, SlotTable


class RunnerJobs:
    """Used in the thread of the worker loop alone. The heartbeat thread and the watchdog read the size of `given`."""

    def __init__(self, slots: SlotTable, recorder: OutcomeRecorder) -> None:
        self.ready: deque[HeldJob] = deque()
        """Jobs that wait for a runner."""
        self.given: dict[int, Slot] = {}
        """By token, the runner that has the attempt. One that was superseded is in its slot alone."""
        self.begun = Begun()
        """Attempts that a runner got: their code may have begun."""
        self._slots = slots
        self._recorder = recorder

    def job_ids(self) -> list[int]:
        """Return the jobs that runners have."""
        return [
            held_job.job.job_id for token, slot in self.given.items() if (held_job := slot.jobs.get(token)) is not None
        ]

    def being_stopped(self) -> set[int]:
        """Return the attempts that a runner is still in though their outcome is not wanted any more."""
        return {token for slot in self._slots.slots.values() for token in slot.jobs if token not in self.given}

    def take_back(self, slot: Slot, now_s: float) -> int:
        """Take back what a runner has not entered, and return the number of these jobs."""
        tokens = slot.runner.take_back()
        for token in tokens:
            held_job = self._slots.remove_job(slot, token)
            self.begun.discard(token)
            if held_job is None or self.given.pop(token, None) is None:
                continue
            if self.is_kept(held_job, now_s):
                self.ready.append(held_job)
        return len(tokens)

    def is_kept(self, held_job: HeldJob, now_s: float) -> bool:
        """Return whether a job that no runner entered waits for another one. Only a cancelled job does not: its end is
        recorded. A drain, a deadline or a lease ends only what has begun."""
        if held_job.stop is not None and isinstance(held_job.stop.outcome, Cancelled):
            self._recorder.cancelled_unbegun(held_job, held_job.stop.outcome)
            return False
        held_job.stop = None
        held_job.queued_s = now_s
        return True
