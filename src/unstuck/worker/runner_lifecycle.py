"""Follow runners from their start to their death, settle the jobs of the dead, and replace a fork server that died."""

import math
import selectors
from collections.abc import Callable
from typing import Literal

from unstuck import host
from unstuck.domain.autopsy import Autopsy
from unstuck.domain.endings import Died
from unstuck.errors import ErrorCode
from unstuck.ledger.contract.workers import Claimed
from unstuck.logs import logger
from unstuck.runner.cgroups import MemoryLimits
from unstuck.runner.fork_server import LEASE_ENDED
from unstuck.runner.status_page import StatusPage
from unstuck.worker.deaths import of_death
from unstuck.worker.fork_client import ForkServerClient, ForkServerDied, RunnerBorn, RunnerExit
from unstuck.worker.held_jobs import HeldJob
from unstuck.worker.journal import JournalWriter
from unstuck.worker.limits import OwnPauses
from unstuck.worker.outcome_recorder import OutcomeRecorder
from unstuck.worker.runner_jobs import RunnerJobs
from unstuck.worker.runner_reader import RunnerReader
from unstuck.worker.slots import Slot, SlotTable

WAIT_FOR_STATUS_S = 2.0
"""How long to wait for a dead runner's exit status once its death is certain. The fork server reports it within
milliseconds, unless it is frozen or has many processes to kill first."""
BIRTH_S = 10.0
"""How long a job waits for its runner to start; the fork server needs milliseconds, unless it is frozen."""

OnDeath = Callable[[Claimed, float | None], tuple[int, int]]
"""Is told every job whose runner died by itself, and when the oldest job of the other runners began. Returns how many
different jobs died here since one ended otherwise, and how often this one did before."""

log = logger("unstuck.worker")


class RunnerLifecycle:
    """Used in the thread of the worker loop alone."""

    def __init__(
        self,
        fork_server: ForkServerClient,
        status_page: StatusPage,
        worker_id: str,
        slots: SlotTable,
        jobs: RunnerJobs,
        recorder: OutcomeRecorder,
        reader: RunnerReader,
        journal_writer: JournalWriter,
        selector: selectors.BaseSelector,
        pauses: OwnPauses,
        on_death: OnDeath,
    ) -> None:
        self._fork_server = fork_server
        self._status_page = status_page
        self._worker_id = worker_id
        self._slots = slots
        self._jobs = jobs
        self._recorder = recorder
        self._reader = reader
        self._journal_writer = journal_writer
        self._selector = selector
        self._pauses = pauses
        self._on_death = on_death
        self._memory = MemoryLimits()
        self.fork_server_gone = False
        """It died, and no other one was started yet."""
        self._in_company = False
        """The fork server died, and several jobs with it."""
        selector.register(fork_server, selectors.EVENT_READ, self._read_fork_server)

    def limit_memory(self, slot: Slot) -> None:
        """Have the kernel limit the memory of the job that a runner is in, if it can; it is measured in any case."""
        if slot.cgroup and not slot.is_async and slot.jobs:
            self._memory.set_memory_limit(slot.cgroup, next(iter(slot.jobs.values())).policy.memory_limit_bytes)

    def _read_fork_server(self, _events: int) -> None:
        for report in self._fork_server.read():
            match report:
                case RunnerBorn():
                    self.runner_started(report)
                case RunnerExit():
                    slot = self._slots.slots.get(report.slot)
                    # By id: a late report must not be taken for the end of the next runner in the same slot.
                    if slot is not None and slot.runner.runner_id == report.runner_id:
                        self.runner_gone(slot, report)
                case ForkServerDied():
                    self._fork_server_died(report.cause)

    # Runners ----------------------------------------------------------------------------------

    def runner_started(self, started: RunnerBorn) -> None:
        """Watch the process of a runner, so that its end is seen at once."""
        slot = self._slots.slots.get(started.slot)
        if slot is None or slot.runner.pid != started.pid or slot.pidfd is not None or slot.gone_s is not None:
            return
        slot.cgroup = started.cgroup
        self.limit_memory(slot)
        slot.pidfd = slot.runner.pidfd()
        if slot.pidfd is not None:
            self._selector.register(slot.pidfd, selectors.EVENT_READ, lambda _events: self._reader.saw_gone(slot))

    def runner_gone_if_late(self, slot: Slot, now_s: float) -> None:
        """Settle the jobs of a dead runner without its exit status if that was not reported in time."""
        if slot.gone_s is not None and now_s - self._pauses.excuse(slot.gone_s) > WAIT_FOR_STATUS_S:
            cause = "its process is gone; the exit status is unknown"
            if slot.runner.lives():
                cause = (
                    "its process let go of the worker and lived on, so it was killed: user code closed descriptors "
                    "that it had not opened, or put another program in its place (exec)"
                )
            self.runner_gone(slot, RunnerExit(slot.index, 0, cause))

    def runner_gone(self, slot: Slot, exit: RunnerExit) -> None:
        """Settle the jobs of a dead runner: what it finished, what it never entered, and what it died in."""
        self._reader.saw_gone(slot)
        self._reader.take_signals(slot)
        self._reader.take_reports(slot)
        self._journal_writer.take(slot)
        now_s = host.boottime_s()
        unsent = {held_job.token for held_job in slot.to_send}
        slot.to_send.clear()
        never_entered = unsent if slot.is_async else unsent | set(slot.runner.take_back())
        if self._status_page.last_pulse_s(slot.index) < slot.opened_s:
            # Its first pulse comes before its first job: it died at its start, or importing the app.
            never_entered = set(slot.jobs)
        back: list[HeldJob] = []
        failed_start = slot.jobs_done == 0 and bool(never_entered) and never_entered >= set(slot.jobs)
        begun = [held_job for held_job in slot.jobs.values() if held_job.token not in never_entered]
        death = of_death(slot, exit, now_s) if begun else None
        if death is not None:
            ended_by_us = next((held_job.stop.kind for held_job in begun if held_job.stop is not None), None)
            self._recorder.metrics.runner_died(death, ended_by_us)
        jobs = self._jobs
        for token in list(slot.jobs):
            held_job = self._slots.remove_job(slot, token)
            if token in never_entered or death is None:
                jobs.begun.discard(token)
            if held_job is None or jobs.given.pop(token, None) is None:
                continue
            if token not in never_entered and death is not None:
                self._died_in(slot, held_job, exit, death, begun, now_s)
            elif jobs.is_kept(held_job, now_s):
                back.append(held_job)
        jobs.ready.extendleft(reversed(back))
        self._slots.remove(slot)
        self._memory.forget(slot.cgroup)
        slot.runner.close()
        if failed_start:
            rest_s = self._slots.start_failed(now_s)
            log.error("A runner died before it began anything", cause=exit.cause, next_in_s=rest_s)

    def _died_in(
        self, slot: Slot, held_job: HeldJob, exit: RunnerExit, death: Autopsy, begun: list[HeldJob], now_s: float
    ) -> None:
        code = ErrorCode.OUT_OF_MEMORY if exit.oom else ErrorCode.WORKER_CRASHED
        # An expired lease is not a crash, whether the worker or the fork server ended the runner.
        counts = not exit.cause.endswith(LEASE_ENDED)
        unasked = held_job.stop is None and counts
        in_a_row, died_here = self._on_death(held_job.job, self._beside_since_s(slot)) if unasked else (0, 0)
        # Jobs that we ended ourselves are not suspects.
        shared: Literal["process", "worker"] | None = "worker" if self._in_company else None
        if slot.is_async and sum(1 for other in begun if other.stop is None) > 1:
            shared = "process"
        died = Died(exit.cause, code, counts=counts, shared=shared, in_a_row=in_a_row, died_here=died_here)
        self._recorder.died(slot, held_job, exit, died, death, begun, now_s)

    def _beside_since_s(self, dead: Slot) -> float | None:
        """Return when the oldest of the jobs began that other runners still run; None if there is none."""
        begun = [
            min(held_job.sent_s for held_job in slot.jobs.values()) if slot.is_async else slot.job_started_s
            for slot in self._slots.slots.values()
            if slot is not dead and slot.jobs and slot.gone_s is None
        ]
        return min(begun, default=None)

    # The fork server --------------------------------------------------------------------------

    def _fork_server_died(self, cause: str) -> None:
        log.error("The fork server died; starting another", cause=cause)
        self._selector.unregister(self._fork_server)
        slots = list(self._slots.slots.values())
        # Any of the jobs that ran then may have killed it, or none of them.
        self._in_company = sum(len(slot.jobs) for slot in slots) > 1
        for slot in slots:
            slot.runner.kill()
            self.runner_gone(slot, RunnerExit(slot.index, 0, f"its fork server died ({cause})"))
        self._in_company = False
        self._fork_server.close()
        self._slots.rest_until_s = math.inf
        self.fork_server_gone = True

    def start_fork_server(self) -> None:
        """Import the app again. That may take long, or fail: hand in first what the dead left behind."""
        self._fork_server.start()
        self._fork_server.configure(self._status_page, self._worker_id)
        self._selector.register(self._fork_server, selectors.EVENT_READ, self._read_fork_server)
        self._slots.rest_until_s = 0.0
        self.fork_server_gone = False

    def start_is_late(self, slot: Slot, now_s: float) -> None:
        """Replace a fork server that does not answer, unless that would end running jobs; then wait without jobs."""
        if all(other.runner.pid is None for other in self._slots.slots.values() if other.jobs):
            log.error("The fork server does not answer and is killed")
            self._fork_server.kill_fork_server()
            return
        taken_back = self._jobs.take_back(slot, now_s)
        if taken_back:
            log.error("The fork server does not answer; giving back what waits for a runner", jobs=taken_back)
            self._slots.rest_until_s = now_s + BIRTH_S
