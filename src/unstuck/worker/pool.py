"""Give jobs to runners, watch the jobs in them, and stop those that break a limit or are not wanted any more."""

import selectors
import time
from collections import deque

from unstuck import host
from unstuck.config import Settings
from unstuck.domain.autopsy import DeathKind, ProgressMark
from unstuck.domain.endings import Cancelled, Died, Outcome
from unstuck.ledger.contract.jobs import Progress
from unstuck.logs import logger
from unstuck.runner.last_output import STREAM_BYTES
from unstuck.runner.status_page import StatusPage
from unstuck.worker import limits
from unstuck.worker.deaths import assign_blame
from unstuck.worker.fork_client import ForkServerClient
from unstuck.worker.held_jobs import HeldJob, Stop
from unstuck.worker.job_metrics import JobMetrics
from unstuck.worker.journal import JournalWriter
from unstuck.worker.limits import OwnPauses, may_begin, must_stop_at_s
from unstuck.worker.outbox import Outbox
from unstuck.worker.outcome_recorder import OutcomeRecorder
from unstuck.worker.pacing import Pace
from unstuck.worker.runner_jobs import RunnerJobs
from unstuck.worker.runner_lifecycle import BIRTH_S, OnDeath, RunnerLifecycle
from unstuck.worker.runner_reader import RunnerReader, silent_after_s
from unstuck.worker.slots import Slot, SlotTable
from unstuck.worker.stop import Stopper

LOOK_S = 0.1
"""How often a busy runner is looked at if no job asks for more: to trim its output, to renew its lease."""

log = logger("unstuck.worker")


class RunnerPool:
    """Its parts own the state: `slots` the runners, `jobs` what they have, `recorder` what ended.

    All of it is used in the thread of the worker loop alone, between two selects."""

    def __init__(
        self,
        fork_server: ForkServerClient,
        status_page: StatusPage,
        worker_id: str,
        settings: Settings,
        slots: int,
        selector: selectors.BaseSelector,
        outbox: Outbox,
        pace: Pace,
        metrics: JobMetrics,
        on_death: OnDeath,
    ) -> None:
        self.slots = SlotTable(fork_server, slots, status_page)
        self.recorder = OutcomeRecorder(outbox, metrics)
        self.jobs = RunnerJobs(self.slots, self.recorder)
        self.journal_writer = JournalWriter(selector, outbox)
        self.reader = RunnerReader(self.slots, self.jobs, self.recorder, self.journal_writer, selector, pace, settings)
        self._pauses = OwnPauses(host.boottime_s())
        self.lifecycle = RunnerLifecycle(
            fork_server,
            status_page,
            worker_id,
            self.slots,
            self.jobs,
            self.recorder,
            self.reader,
            self.journal_writer,
            selector,
            self._pauses,
            on_death,
        )
        self._stopper = Stopper(status_page, settings.stop_grace_s)
        self._status_page = status_page
        self._outbox = outbox
        self._pace = pace
        self._import_timeout_s = fork_server.import_timeout_s
        self._silent_s = silent_after_s(settings)
        self._confirmed_s = 0.0

    # What the loop calls ----------------------------------------------------------------------

    def confirm(self, sent_s: float) -> None:
        """Count every lease from when a heartbeat was sent, now that it is confirmed."""
        self._confirmed_s = sent_s
        self.slots.renew_leases(sent_s)

    def feed(self, depth: int) -> None:
        """Give every ready job to a runner that can take it."""
        jobs, slots = self.jobs, self.slots
        if jobs.ready:
            now_s = host.boottime_s()
            quick_since_s = now_s - self._pace.slow_s()
            waiting: deque[HeldJob] = deque()
            for held_job in jobs.ready:
                slot = None
                if may_begin(held_job, self._confirmed_s, now_s):
                    slot = slots.assign(held_job, now_s, depth, quick_since_s)
                if slot is None:
                    waiting.append(held_job)
                else:
                    jobs.given[held_job.token] = slot
                    jobs.begun.add(held_job.token)
                    slots.look_at_s = min(slots.look_at_s, slot.look_at_s)
            jobs.ready = waiting
        for slot in slots.opened:
            self.reader.watch(slot)
        slots.opened.clear()
        for slot in slots.loaded:
            if slot.gone_s is None:
                held_jobs, slot.to_send = slot.to_send, []
                slots.tighten_lease(slot, held_jobs, self._confirmed_s)
                self.lifecycle.limit_memory(slot)
                slot.runner.send([held_job.frame() for held_job in held_jobs])
                self.reader.watch_writing(slot)
        slots.loaded.clear()

    def tick(self, now_s: float) -> None:
        """Look at every runner whose jobs are due for it, and replace a fork server that died."""
        self._pauses.look(now_s)
        if self.lifecycle.fork_server_gone and not len(self._outbox):
            self.lifecycle.start_fork_server()
        slots = self.slots
        if now_s < slots.look_at_s:
            return
        slots.look_at_s = next_look_s = limits.next_grid_time(now_s + LOOK_S / 2, LOOK_S)
        for slot in list(slots.slots.values()):
            if slot.gone_s is not None:
                self.lifecycle.runner_gone_if_late(slot, now_s)
            elif slot.jobs:
                if now_s >= slot.look_at_s:
                    slot.look_at_s = next_look_s
                    slots.renew_lease(slot, self._confirmed_s)
                    self._check_slot(slot, now_s)
                slots.look_at_s = min(slots.look_at_s, slot.look_at_s)

    def stop(self, token: int, fate: Outcome, kind: DeathKind, now_s: float) -> None:
        """End a job that a runner has; what it becomes is written when it is really over."""
        slot = self.jobs.given.get(token)
        held_job = None if slot is None else slot.jobs.get(token)
        if slot is not None and held_job is not None and held_job.stop is None:
            self._stop(slot, held_job, fate, kind, now_s)

    def _stop(self, slot: Slot, held_job: HeldJob, fate: Outcome, kind: DeathKind, now_s: float) -> None:
        if not slot.is_async:
            held_job.stop = Stop(fate, kind)  # If the job is taken back before it began, this settles it.
            self.jobs.take_back(slot, now_s)
            # From here on it can enter nothing more. If this job's end is reported already, it is in the next one,
            # which is not to blame.
            self.reader.gather(slot)
            if held_job.token not in slot.jobs:
                return
            # What it was interrupted in may be half done: no other job may begin in this process.
            slot.retire()
        self._stopper.begin(slot, held_job, fate, kind, now_s)
        self._next_action(slot, held_job, now_s)
        self.slots.look_at_s = now_s

    def stop_superseded(self, token: int, now_s: float) -> None:
        """Stop an attempt whose job another worker has now; its outcome is not wanted."""
        slot = self.jobs.given.pop(token, None)
        if slot is None:
            return
        held_job = slot.jobs[token]
        log.warning("Stopping an attempt that was superseded", job_id=held_job.job.job_id, token=token)
        if held_job.stop is None:
            self._stop(slot, held_job, Died("superseded", counts=False), DeathKind.LEASE, now_s)

    def cancel(self, token: int) -> bool:
        """Cancel a job that a runner has; return False if none has it."""
        slot = self.jobs.given.get(token)
        if slot is None:
            return False
        slot.jobs[token].cancel_requested = True
        fate = Cancelled("cancelled by request while it ran")
        self.stop(token, fate, DeathKind.OPERATOR, host.boottime_s())
        return True

    def retract_all(self) -> None:
        """Take back every job that no runner entered yet."""
        now_s = host.boottime_s()
        for slot in list(self.slots.slots.values()):
            if not slot.is_async and len(slot.jobs) > 1:
                self.jobs.take_back(slot, now_s)

    def kill_all(self, fate: Outcome | None) -> None:
        """Kill every runner that is in a job; the jobs meet `fate` unless theirs is sealed already."""
        for slot in list(self.slots.slots.values()):
            for held_job in slot.jobs.values():
                if held_job.stop is None and fate is not None:
                    held_job.stop = Stop(fate, DeathKind.DRAIN, actions=["SIGKILL"])
            if slot.jobs or fate is None:
                slot.runner.kill()

    def release_waiting(self, older_than_s: float, now_s: float) -> None:
        """Release ready jobs that found no runner for this time: another worker may have one that is free."""
        ready = self.jobs.ready
        while ready and now_s - ready[0].queued_s >= older_than_s:
            held_job = ready.popleft()
            self._outbox.give_back(held_job.job.job_id, held_job.token, held_job.job.queue)

    def take_notes(self, now_s: float) -> list[Progress]:
        """Return what running jobs reported of their progress since the last call."""
        at = time.time() - now_s
        notes = []
        for token, slot in self.jobs.given.items():
            held_job = slot.jobs.get(token)
            if held_job is not None and held_job.unreported:
                held_job.unreported = False
                mark = held_job.progress or ProgressMark()
                busy = at + held_job.silent_since_s if held_job.silent_since_s else None
                said = at + (held_job.last_heartbeat_s or held_job.sent_s)
                notes.append(Progress(held_job.job.job_id, token, said, mark.done, mark.total, mark.message, busy))
        return notes

    # Watching ---------------------------------------------------------------------------------

    def _check_slot(self, slot: Slot, now_s: float) -> None:
        slot.runner.trim_output()
        self._keep_words(slot)
        sent_s = next(iter(slot.jobs.values())).sent_s
        if slot.runner.pid is None and now_s - self._pauses.excuse(sent_s) > BIRTH_S:
            self.lifecycle.start_is_late(slot, now_s)
            return
        if slot.is_async:
            held_jobs = list(slot.jobs.values())
        else:
            if len(slot.jobs) > 1 and now_s - slot.job_started_s > self._pace.slow_s():
                # The jobs that wait behind a long one can run elsewhere.
                self.jobs.take_back(slot, now_s)
            held_jobs = list(slot.jobs.values())[:1]
        pulse_s = self._status_page.last_pulse_s(slot.index)
        self._measure_memory(slot, held_jobs, now_s)
        if not self._is_awake(slot, pulse_s, now_s):
            return
        for held_job in held_jobs:
            since = self._moments(slot, held_job, pulse_s, now_s)
            self._check_job(slot, held_job, since, now_s)
            if not slot.jobs or self._next_action(slot, held_job, now_s):
                return
            # The limit of one that is being stopped is long past: looking at that would keep this loop spinning.
            stopping = held_job.stop is not None
            wake_s = self._stopper.next_step_s(slot, held_job) if stopping else limits.look_again_s(held_job, since)
            slot.look_at_s = min(slot.look_at_s, max(wake_s, now_s))

    def _keep_words(self, slot: Slot) -> None:
        """Copy the end of what the present job of a runner printed to a file that can be read if we are killed."""
        words = self.slots.words
        if words is None or slot.is_async:
            # Only the jobs of an async runner know which of them printed what.
            return
        stdout, stderr = slot.runner.output_news(STREAM_BYTES)
        if stdout is not None or stderr is not None:
            held_job = next(iter(slot.jobs.values()))
            words.note_output(held_job.job.job_id, held_job.token, stdout, stderr)
            words.note_memory(held_job.token, slot.memory_bytes)

    def _is_awake(self, slot: Slot, pulse_s: float, now_s: float) -> bool:
        """Note when a runner can begin its first job; return False if it took too long for that and was killed."""
        if not slot.ready_s and pulse_s >= slot.opened_s:
            slot.ready_s = pulse_s
        if slot.ready_s or slot.runner.pid is None:
            return True
        if now_s - self._pauses.excuse(slot.opened_s) <= self._import_timeout_s:
            return True
        log.error("A runner does not begin and is killed", slot=slot.index)
        slot.runner.kill()
        return False

    def _moments(self, slot: Slot, held_job: HeldJob, pulse_s: float, now_s: float) -> limits.Moments:
        """Return when the limits of a job begin: not before its process could begin it, and not while we slept."""
        began_s = max(held_job.sent_s if slot.is_async else slot.job_started_s, slot.ready_s or now_s)
        excuse = self._pauses.excuse
        last_heartbeat_s, pulse_s = (
            max(now_s if held_job.journal_pending else held_job.last_heartbeat_s, began_s),
            max(pulse_s, began_s),
        )
        return limits.Moments(excuse(began_s), excuse(last_heartbeat_s), excuse(pulse_s))

    def _measure_memory(self, slot: Slot, held_jobs: list[HeldJob], now_s: float) -> None:
        if now_s < slot.measure_at_s or slot.runner.pid is None or now_s - slot.job_started_s < LOOK_S:
            return
        limit_bytes = held_jobs[0].policy.memory_limit_bytes if held_jobs and not slot.is_async else None
        weigh = host.memory_bytes if limit_bytes is None else host.family_memory_bytes
        # The dead weigh nothing: what it weighed before is what people will ask for.
        slot.memory_bytes = weigh(slot.runner.pid) or slot.memory_bytes
        wait_s = limits.measure_again_s(limit_bytes, slot.memory_bytes)
        slot.measure_at_s = limits.next_grid_time(now_s + wait_s / 2, wait_s)
        if limit_bytes is not None:
            slot.look_at_s = min(slot.look_at_s, slot.measure_at_s)

    def _check_job(self, slot: Slot, held_job: HeldJob, since: limits.Moments, now_s: float) -> None:
        self._note_silence(held_job, since.pulse_s, now_s)
        if held_job.stop is not None:
            return
        found = limits.broken_limit(held_job, since, now_s, slot.memory_bytes)
        if found is not None:
            fate, kind = found
            log.warning(
                "Ending a job that broke a limit", job_id=held_job.job.job_id, task=held_job.job.task, limit=kind
            )
            self.stop(held_job.token, fate, kind, now_s)
            return
        stop_at_s = must_stop_at_s(held_job, self._confirmed_s)
        if stop_at_s is not None and now_s > stop_at_s:
            log.error("Stopping a job: no beat was confirmed before its lease ended", job_id=held_job.job.job_id)
            fate = Died("lease ran out: the ledger could not be reached", counts=False)
            self.stop(held_job.token, fate, DeathKind.LEASE, now_s)

    def _note_silence(self, held_job: HeldJob, pulse_s: float, now_s: float) -> None:
        """Show, and nothing more, that no Python code runs in a process: C code may take as long as it needs."""
        silent = now_s - pulse_s > self._silent_s
        if silent != bool(held_job.silent_since_s):
            held_job.silent_since_s = pulse_s if silent else 0.0
            held_job.unreported = True

    def _next_action(self, slot: Slot, held_job: HeldJob, now_s: float) -> bool:
        """Take the next step to end a job; return True if its runner was killed for it."""
        if not self._stopper.press(slot, held_job, now_s):
            return False
        if slot.is_async:
            assign_blame(slot, held_job, self._status_page.last_pulse_s(slot.index), self._silent_s, now_s)
        slot.runner.kill()
        return True
