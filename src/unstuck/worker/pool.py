"""Feed the runners, gather what they finish, and watch over what they are in.

What ended goes into the outbox; what never began comes back to `ready`. All of it happens in the floor's
thread, between two selects.
"""

import selectors
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from unstuck import host
from unstuck.config import Settings
from unstuck.domain.autopsy import DeathKind, ProgressMark
from unstuck.domain.endings import Cancelled, Died, Outcome
from unstuck.domain.events import EventKind
from unstuck.domain.units import brief
from unstuck.ledger.contract.workers import Progress
from unstuck.logs import logger
from unstuck.runner.last_output import STREAM_BYTES
from unstuck.runner.status_page import StatusPage
from unstuck.worker import limits
from unstuck.worker.deaths import BIRTH_S, RunnerDeaths, assign_blame
from unstuck.worker.fork_client import ForkServerClient
from unstuck.worker.held_jobs import HeldJob, Stop
from unstuck.worker.limits import may_begin, must_stop_at_s
from unstuck.worker.outbox import Outbox
from unstuck.worker.pacing import Pace
from unstuck.worker.slots import BlockedLoop, Slot
from unstuck.worker.stop import Stopper

LOOK_S = 0.1
"""How often a busy runner is looked at where no job asks for more: to trim its output, to renew its lease."""
SILENT_S = 3.0
"""Without a pulse for so long, an interpreter is called silent: busy in C code, as a rule."""

log = logger("unstuck.worker")


class RunnerPool(RunnerDeaths):
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
    ) -> None:
        super().__init__(fork_server, status_page, worker_id, slots, selector, outbox, pace)
        self._settings = settings
        self._stopper = Stopper(status_page, settings.stop_grace_s)
        self._silent_s = max(SILENT_S, 3 * settings.recovery.runner_heartbeat_interval_s)
        self._confirmed_s = 0.0
        self._news: list[tuple[EventKind, int, str]] = []
        self.look_at_s = 0.0
        """When some runner has to be looked at next."""

    # What the floor calls ---------------------------------------------------------------------

    def confirm(self, sent_s: float) -> None:
        """A beat was confirmed: every lease counts from when it was sent."""
        self._confirmed_s = sent_s
        self.slots.renew_leases(sent_s)

    def feed(self, depth: int) -> None:
        """Give every ready job to a runner that can take it."""
        if self.ready:
            now_s = host.boottime_s()
            quick_since_s = now_s - self._pace.slow_s()
            waiting: deque[HeldJob] = deque()
            for held_job in self.ready:
                slot = None
                if may_begin(held_job, self._confirmed_s, now_s):
                    slot = self.slots.assign(held_job, now_s, depth, quick_since_s)
                if slot is None:
                    waiting.append(held_job)
                else:
                    self.given[held_job.token] = slot
                    self.begun.add(held_job.token)
                    self.look_at_s = min(self.look_at_s, slot.look_at_s)
            self.ready = waiting
        for slot in self.slots.opened:
            self._selector.register(slot.runner, selectors.EVENT_READ, self._reader(slot))
            self._selector.register(slot.runner.signals, selectors.EVENT_READ, self._signal_reader(slot))
            self.journal_writer.watch(slot)
        self.slots.opened.clear()
        for slot in self.slots.loaded:
            if slot.gone_s is None:
                held_jobs, slot.to_send = slot.to_send, []
                self.slots.tighten_lease(slot, held_jobs, self._confirmed_s)
                self._limit_memory(slot)
                slot.runner.send([held_job.frame() for held_job in held_jobs])
                self._watch_writing(slot)
        self.slots.loaded.clear()

    def tick(self, now_s: float) -> None:
        self._pauses.look(now_s)
        if self._fork_server_gone and not len(self._outbox):
            self._start_fork_server()
        if now_s < self.look_at_s:
            return
        self.look_at_s = next_look_s = limits.next_grid_time(now_s + LOOK_S / 2, LOOK_S)
        for slot in list(self.slots.slots.values()):
            if slot.gone_s is not None:
                self._runner_gone_if_late(slot, now_s)
            elif slot.jobs:
                if now_s >= slot.look_at_s:
                    slot.look_at_s = next_look_s
                    self.slots.renew_lease(slot, self._confirmed_s)
                    self._check_slot(slot, now_s)
                self.look_at_s = min(self.look_at_s, slot.look_at_s)

    def stop(self, token: int, fate: Outcome, kind: DeathKind, now_s: float) -> None:
        """End a job that a runner has; what it becomes is written when it is really over."""
        slot = self.given.get(token)
        held_job = None if slot is None else slot.jobs.get(token)
        if slot is not None and held_job is not None and held_job.stop is None:
            self._stop(slot, held_job, fate, kind, now_s)

    def _stop(self, slot: Slot, held_job: HeldJob, fate: Outcome, kind: DeathKind, now_s: float) -> None:
        if not slot.is_async:
            held_job.stop = Stop(fate, kind)  # So that a job taken back unbegun is settled by it.
            for token in slot.runner.take_back():
                self._returned(slot, token, now_s)
            # From here on it can enter nothing more. Where this job's end is reported already, it is in the next one,
            # which is not to blame.
            self._gather(slot)
            if held_job.token not in slot.jobs:
                return
            # What it was interrupted in may be half done: nobody else's job shall begin in this process.
            self._retire(slot)
        self._stopper.begin(slot, held_job, fate, kind, now_s)
        self._next_action(slot, held_job, now_s)
        self.look_at_s = now_s

    def stop_superseded(self, token: int, now_s: float) -> None:
        """Somebody else has this job now: stop ours, and want nothing of it."""
        slot = self.given.pop(token, None)
        if slot is None:
            return
        held_job = slot.jobs[token]
        log.warning("Stopping an attempt that was superseded", job_id=held_job.job.job_id, token=token)
        if held_job.stop is None:
            self._stop(slot, held_job, Died("superseded", counts=False), DeathKind.LEASE, now_s)

    def being_stopped(self) -> set[int]:
        """Return the attempts that a runner is still in, though we want nothing of them any more."""
        return {token for slot in self.slots.slots.values() for token in slot.jobs if token not in self.given}

    def cancel(self, token: int) -> bool:
        """Cancel a job that a runner has; False where none has it."""
        slot = self.given.get(token)
        if slot is None:
            return False
        slot.jobs[token].cancel_requested = True
        fate = Cancelled("cancelled by request while it ran")
        self.stop(token, fate, DeathKind.OPERATOR, host.boottime_s())
        return True

    def retract_all(self) -> None:
        """Take back whatever no runner entered yet."""
        now_s = host.boottime_s()
        for slot in list(self.slots.slots.values()):
            if not slot.is_async and len(slot.jobs) > 1:
                for token in slot.runner.take_back():
                    self._returned(slot, token, now_s)

    def kill_all(self, fate: Outcome | None) -> None:
        """Kill every runner that is in a job; the jobs meet `fate` unless theirs is sealed already."""
        for slot in list(self.slots.slots.values()):
            for held_job in slot.jobs.values():
                if held_job.stop is None and fate is not None:
                    held_job.stop = Stop(fate, DeathKind.DRAIN, actions=["SIGKILL"])
            if slot.jobs or fate is None:
                slot.runner.kill()

    def release_waiting(self, older_than_s: float, now_s: float) -> None:
        """Give back ready jobs that found no runner for so long: somebody else may be free."""
        while self.ready and now_s - self.ready[0].queued_s >= older_than_s:
            held_job = self.ready.popleft()
            self._outbox.give_back(held_job.job.job_id, held_job.token, held_job.job.queue)

    def take_notes(self, now_s: float) -> list[Progress]:
        """Give what running jobs said of themselves since the last time."""
        at = time.time() - now_s
        notes = []
        for token, slot in self.given.items():
            held_job = slot.jobs.get(token)
            if held_job is not None and held_job.unreported:
                held_job.unreported = False
                mark = held_job.progress or ProgressMark()
                busy = at + held_job.silent_since_s if held_job.silent_since_s else None
                said = at + (held_job.last_heartbeat_s or held_job.sent_s)
                notes.append(Progress(held_job.job.job_id, token, said, mark.done, mark.total, mark.message, busy))
        return notes

    def take_news(self) -> list[tuple[EventKind, int, str]]:
        """Give what people should hear of running jobs."""
        news, self._news = self._news, []
        return news

    # Reading ----------------------------------------------------------------------------------

    def _reader(self, slot: Slot) -> Callable[[int], None]:
        return lambda events: self._read_runner(slot, events)

    def _signal_reader(self, slot: Slot) -> Callable[[int], None]:
        return lambda _events: self._take_signals(slot)

    def _watch_writing(self, slot: Slot) -> None:
        if slot.gone_s is None:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if slot.runner.wants_write() else 0)
            key = self._selector.get_key(slot.runner)
            if key.events != wanted:
                self._selector.modify(slot.runner, wanted, key.data)

    def _read_runner(self, slot: Slot, events: int) -> None:
        if slot.gone_s is not None:
            return
        if events & selectors.EVENT_WRITE:
            slot.runner.flush()
            self._watch_writing(slot)
        if events & selectors.EVENT_READ:
            self._gather(slot)
            if slot.runner.closed:
                self._saw_gone(slot)

    def _gather(self, slot: Slot) -> None:
        self._take_reports(slot)
        if not slot.jobs and not slot.shared and not slot.retiring:
            self._recycle_if_due(slot, host.boottime_s())

    def _take_signals(self, slot: Slot) -> None:
        signs = slot.runner.read_signals()
        if not signs and slot.gone_s is None:
            # Readable and empty: user code closed its end, and nothing will ever come.
            self._selector.unregister(slot.runner.signals)
        for signal_ in signs:
            if signal_.noted:
                slot.runner.stacks.heard(signal_.token)
                slot.look_at_s = self.look_at_s = 0.0  # a job may wait for this to be stopped
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
                if self.slots.words is not None:
                    self.slots.words.note_progress(held_job.job.job_id, held_job.token, held_job.progress)

    def _note_blocker(self, slot: Slot, blocker: BlockedLoop) -> None:
        """Note who keeps a loop from turning, and tell people of it once where it takes long."""
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

    def _recycle_if_due(self, slot: Slot, now_s: float) -> None:
        settings = self._settings
        due = slot.run_alone or 0 < settings.recycle_after_jobs <= slot.jobs_done
        if not due and settings.recycle_over_memory_bytes:
            due = slot.outgrew(settings.recycle_over_memory_bytes, now_s)
        if due:
            self._retire(slot)

    def _retire(self, slot: Slot) -> None:
        slot.retiring = True
        slot.runner.retire()

    # Watching ---------------------------------------------------------------------------------

    def _check_slot(self, slot: Slot, now_s: float) -> None:
        slot.runner.trim_output()
        self._keep_words(slot)
        sent_s = next(iter(slot.jobs.values())).sent_s
        if slot.runner.pid is None and now_s - self._pauses.excuse(sent_s) > BIRTH_S:
            self._miss_birth(slot, now_s)
            return
        if slot.is_async:
            held_jobs = list(slot.jobs.values())
        else:
            if len(slot.jobs) > 1 and now_s - slot.job_started_s > self._pace.slow_s():
                # Whoever waits behind a long job can be served elsewhere.
                for token in slot.runner.take_back():
                    self._returned(slot, token, now_s)
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
        """Copy the end of what the present job of a runner printed to where others can read it if we are killed."""
        words = self.slots.words
        if words is None or slot.is_async:
            # Of an async runner only the jobs themselves know who of them printed what.
            return
        stdout, stderr = slot.runner.output_news(STREAM_BYTES)
        if stdout is not None or stderr is not None:
            held_job = next(iter(slot.jobs.values()))
            words.note_output(held_job.job.job_id, held_job.token, stdout, stderr)
            words.note_memory(held_job.token, slot.memory_bytes)

    def _is_awake(self, slot: Slot, pulse_s: float, now_s: float) -> bool:
        """Note when a runner can begin its first job; False when it took too long for that and was killed."""
        if not slot.ready_s and pulse_s >= slot.opened_s:
            slot.ready_s = pulse_s
        if slot.ready_s or slot.runner.pid is None:
            return True
        if now_s - self._pauses.excuse(slot.opened_s) <= self._fork_server.import_timeout_s:
            return True
        log.error("A runner does not begin and is killed", slot=slot.index)
        slot.runner.kill()
        return False

    def _moments(self, slot: Slot, held_job: HeldJob, pulse_s: float, now_s: float) -> limits.Moments:
        """Say from when on the limits of a job count: not before its process could begin it, and not while we slept."""
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
        """Take the next step to end a job; True when its runner was killed for it."""
        if not self._stopper.press(slot, held_job, now_s):
            return False
        if slot.is_async:
            assign_blame(slot, held_job, self._status_page.last_pulse_s(slot.index), self._silent_s, now_s)
        slot.runner.kill()
        return True
