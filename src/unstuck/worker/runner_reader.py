"""Read what runners send: reports of jobs that ended, and signals of jobs that run."""

import selectors
import time
from dataclasses import replace

from unstuck import host
from unstuck.config import Settings
from unstuck.domain.autopsy import ProgressMark
from unstuck.domain.events import EventKind
from unstuck.domain.units import brief
from unstuck.logs import logger
from unstuck.worker.journal import JournalWriter
from unstuck.worker.outcome_recorder import OutcomeRecorder
from unstuck.worker.pacing import Pace
from unstuck.worker.runner_jobs import RunnerJobs
from unstuck.worker.runner_process import Finished
from unstuck.worker.slots import BlockedLoop, Slot, SlotTable

SILENT_S = 3.0
"""An interpreter without a pulse for this time is called silent: as a rule it is busy in C code."""

log = logger("unstuck.worker")


def silent_after_s(settings: Settings) -> float:
    """Return after which time without a pulse a runner is called silent."""
    return max(SILENT_S, 3 * settings.recovery.runner_heartbeat_interval_s)


class RunnerReader:
    """Watches the sockets of runners. Used in the thread of the worker loop alone."""

    def __init__(
        self,
        slots: SlotTable,
        jobs: RunnerJobs,
        recorder: OutcomeRecorder,
        journal_writer: JournalWriter,
        selector: selectors.BaseSelector,
        pace: Pace,
        settings: Settings,
    ) -> None:
        self._slots = slots
        self._jobs = jobs
        self._recorder = recorder
        self._journal_writer = journal_writer
        self._selector = selector
        self._pace = pace
        self._recycle_after_jobs = settings.recycle_after_jobs
        self._recycle_over_bytes = settings.recycle_over_memory_bytes
        self._silent_s = silent_after_s(settings)
        self._news: list[tuple[EventKind, int, str]] = []

    def take_news(self) -> list[tuple[EventKind, int, str]]:
        """Return what people should hear of running jobs, since the last call."""
        news, self._news = self._news, []
        return news

    # Sockets ----------------------------------------------------------------------------------

    def watch(self, slot: Slot) -> None:
        """Read from a new runner whenever it sends something."""
        self._selector.register(slot.runner, selectors.EVENT_READ, lambda events: self._read(slot, events))
        self._selector.register(slot.runner.signals, selectors.EVENT_READ, lambda _events: self.take_signals(slot))
        self._journal_writer.watch(slot)

    def watch_writing(self, slot: Slot) -> None:
        """Wait for room in the socket of a runner if not everything could be sent."""
        if slot.gone_s is None:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if slot.runner.wants_write() else 0)
            key = self._selector.get_key(slot.runner)
            if key.events != wanted:
                self._selector.modify(slot.runner, wanted, key.data)

    def saw_gone(self, slot: Slot) -> None:
        """Note an end that the kernel reported; the fork server reports the exit status shortly after."""
        if slot.gone_s is None:
            slot.gone_s = host.boottime_s()
            for watched in (slot.runner, slot.runner.signals, slot.runner.journal_connection.socket, slot.pidfd):
                if watched is not None:
                    try:
                        self._selector.unregister(watched)
                    except (KeyError, ValueError):
                        pass
            slot.pidfd = None

    def _read(self, slot: Slot, events: int) -> None:
        if slot.gone_s is not None:
            return
        if events & selectors.EVENT_WRITE:
            slot.runner.flush()
            self.watch_writing(slot)
        if events & selectors.EVENT_READ:
            self.gather(slot)
            if slot.runner.closed:
                self.saw_gone(slot)

    # Reports ----------------------------------------------------------------------------------

    def gather(self, slot: Slot) -> None:
        """Take the reports of a runner, and replace it if it is idle and due for that."""
        self.take_reports(slot)
        if not slot.jobs and not slot.shared and not slot.retiring:
            self._recycle_if_due(slot, host.boottime_s())

    def take_reports(self, slot: Slot) -> None:
        """Take the reports of a runner."""
        if finished := slot.runner.read():
            # Between the two: whatever a job wrote down was sent before its report.
            self._journal_writer.take(slot)
            self._take_ended(slot, finished)

    def _take_ended(self, slot: Slot, finished: list[Finished]) -> None:
        if not finished:
            return
        now_s = host.boottime_s()
        began_s = slot.job_started_s
        slots, given, recorder = self._slots, self._jobs.given, self._recorder
        slots.saw_life()
        if not slot.is_async:
            self._pace.saw_sync_jobs(len(finished), now_s - slot.job_started_s)
            slot.job_started_s = now_s
        # Those of a sync runner ended one after another, between two looks.
        each_s = (now_s - began_s) / len(finished)
        for number, item in enumerate(finished):
            held_job = slots.remove_job(slot, item.token)
            if held_job is None or given.pop(item.token, None) is None:
                continue  # Superseded meanwhile: its outcome is not wanted any more.
            if slot.is_async:
                recorder.metrics.ran(held_job, held_job.sent_s, now_s - held_job.sent_s)
            else:
                recorder.metrics.ran(held_job, began_s + number * each_s, each_s)
            recorder.ended(slot, held_job, item, now_s - (held_job.sent_s if slot.is_async else began_s))
        slot.jobs_done += len(finished)

    def _recycle_if_due(self, slot: Slot, now_s: float) -> None:
        due = slot.run_alone or 0 < self._recycle_after_jobs <= slot.jobs_done
        if not due and self._recycle_over_bytes:
            due = slot.outgrew(self._recycle_over_bytes, now_s)
        if due:
            slot.retire()

    # Signals ----------------------------------------------------------------------------------

    def take_signals(self, slot: Slot) -> None:
        """Take the heartbeats and the progress of the jobs in a runner, and what it says of itself."""
        signs = slot.runner.read_signals()
        if not signs and slot.gone_s is None:
            # Readable and empty: user code closed its end, and nothing will ever come.
            self._selector.unregister(slot.runner.signals)
        for signal_ in signs:
            if signal_.noted:
                slot.runner.stacks.heard(signal_.token)
                slot.look_at_s = self._slots.look_at_s = 0.0  # a job may wait for this to be stopped
                continue
            if signal_.blocks:
                self._note_blocker(slot, BlockedLoop(signal_.token, signal_.at_s, host.boottime_s()))
                continue
            held_job = slot.jobs.get(signal_.token)
            if held_job is None:
                continue
            held_job.last_heartbeat_s = max(held_job.last_heartbeat_s, signal_.at_s)
            if signal_.is_progress:
                at = time.time() - (host.boottime_s() - signal_.at_s)
                held_job.progress = ProgressMark(signal_.done, signal_.total, signal_.message or "", round(at, 3))
                held_job.unreported = True
                if self._slots.words is not None:
                    self._slots.words.note_progress(held_job.job.job_id, held_job.token, held_job.progress)

    def _note_blocker(self, slot: Slot, blocker: BlockedLoop) -> None:
        """Note which job blocks an event loop, and report it once if that takes long."""
        told = slot.blocker is not None and slot.blocker.told and slot.blocker.since_s == blocker.since_s
        held_job = slot.jobs.get(blocker.token)
        if not told and held_job is not None and len(slot.jobs) > 1 and blocker.for_s > self._silent_s:
            told = True
            others = len(slot.jobs) - 1
            text = (
                f"It has kept the event loop that it shares with {others} other job{'' if others == 1 else 's'} from "
                f"turning for {brief(blocker.for_s)}"
            )
            log.warning(
                "A job blocks the event loop that others share", job_id=held_job.job.job_id, task=held_job.job.task
            )
            self._news.append((EventKind.LOOP_BLOCKED, held_job.job.job_id, text))
        slot.blocker = replace(blocker, told=told)
