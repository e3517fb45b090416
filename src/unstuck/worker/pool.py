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
        bench: ForkServerClient,
        trace: StatusPage,
        worker_id: str,
        settings: Settings,
        slots: int,
        selector: selectors.BaseSelector,
        outbox: Outbox,
        pace: Pace,
    ) -> None:
        super().__init__(bench, trace, worker_id, slots, selector, outbox, pace)
        self._settings = settings
        self._stopper = Stopper(trace, settings.stop_grace_s)
        self._silent_s = max(SILENT_S, 3 * settings.recovery.runner_heartbeat_interval_s)
        self._confirmed_s = 0.0
        self._news: list[tuple[EventKind, int, str]] = []
        self.look_at_s = 0.0
        """When some runner has to be looked at next."""

    # What the floor calls ---------------------------------------------------------------------

    def confirm(self, sent_s: float) -> None:
        """A beat was confirmed: every lease counts from when it was sent."""
        self._confirmed_s = sent_s
        self.roster.renew_leases(sent_s)

    def feed(self, depth: int) -> None:
        """Give every ready job to a runner that can take it."""
        if self.ready:
            now_s = host.boottime_s()
            quick_since_s = now_s - self._pace.slow_s()
            waiting: deque[HeldJob] = deque()
            for hold in self.ready:
                crew = None
                if may_begin(hold, self._confirmed_s, now_s):
                    crew = self.roster.place(hold, now_s, depth, quick_since_s)
                if crew is None:
                    waiting.append(hold)
                else:
                    self.given[hold.token] = crew
                    self.begun.add(hold.token)
                    self.look_at_s = min(self.look_at_s, crew.look_at_s)
            self.ready = waiting
        for crew in self.roster.opened:
            self._selector.register(crew.runner, selectors.EVENT_READ, self._reader(crew))
            self._selector.register(crew.runner.signs, selectors.EVENT_READ, self._sign_reader(crew))
            self.scribes.watch(crew)
        self.roster.opened.clear()
        for crew in self.roster.loaded:
            if crew.gone_s is None:
                holds, crew.to_send = crew.to_send, []
                self.roster.tighten_lease(crew, holds, self._confirmed_s)
                self._limit_memory(crew)
                crew.runner.send([hold.frame() for hold in holds])
                self._watch_writing(crew)
        self.roster.loaded.clear()

    def tick(self, now_s: float) -> None:
        self._pauses.look(now_s)
        if self._nursery_gone and not len(self._outbox):
            self._start_nursery()
        if now_s < self.look_at_s:
            return
        self.look_at_s = next_look_s = limits.on_heartbeat(now_s + LOOK_S / 2, LOOK_S)
        for crew in list(self.roster.crews.values()):
            if crew.gone_s is not None:
                self._bury_if_late(crew, now_s)
            elif crew.jobs:
                if now_s >= crew.look_at_s:
                    crew.look_at_s = next_look_s
                    self.roster.renew_lease(crew, self._confirmed_s)
                    self._check_crew(crew, now_s)
                self.look_at_s = min(self.look_at_s, crew.look_at_s)

    def stop(self, token: int, fate: Outcome, kind: DeathKind, now_s: float) -> None:
        """End a job that a runner has; what it becomes is written when it is really over."""
        crew = self.given.get(token)
        hold = None if crew is None else crew.jobs.get(token)
        if crew is not None and hold is not None and hold.stop is None:
            self._stop(crew, hold, fate, kind, now_s)

    def _stop(self, crew: Slot, hold: HeldJob, fate: Outcome, kind: DeathKind, now_s: float) -> None:
        if not crew.is_async:
            hold.stop = Stop(fate, kind)  # So that a job taken back unbegun is settled by it.
            for token in crew.runner.take_back():
                self._came_back(crew, token, now_s)
            # From here on it can enter nothing more. Where this job's end is reported already, it is in the next one,
            # which is not to blame.
            self._gather(crew)
            if hold.token not in crew.jobs:
                return
            # What it was interrupted in may be half done: nobody else's job shall begin in this process.
            self._retire(crew)
        self._stopper.begin(crew, hold, fate, kind, now_s)
        self._next_action(crew, hold, now_s)
        self.look_at_s = now_s

    def stop_superseded(self, token: int, now_s: float) -> None:
        """Somebody else has this job now: stop ours, and want nothing of it."""
        crew = self.given.pop(token, None)
        if crew is None:
            return
        hold = crew.jobs[token]
        log.warning("Stopping an attempt that was superseded", job_id=hold.job.job_id, token=token)
        if hold.stop is None:
            self._stop(crew, hold, Died("superseded", counts=False), DeathKind.LEASE, now_s)

    def being_stopped(self) -> set[int]:
        """Return the attempts that a runner is still in, though we want nothing of them any more."""
        return {token for crew in self.roster.crews.values() for token in crew.jobs if token not in self.given}

    def cancel(self, token: int) -> bool:
        """Cancel a job that a runner has; False where none has it."""
        crew = self.given.get(token)
        if crew is None:
            return False
        crew.jobs[token].cancel_requested = True
        fate = Cancelled("cancelled by request while it ran")
        self.stop(token, fate, DeathKind.OPERATOR, host.boottime_s())
        return True

    def retract_all(self) -> None:
        """Take back whatever no runner entered yet."""
        now_s = host.boottime_s()
        for crew in list(self.roster.crews.values()):
            if not crew.is_async and len(crew.jobs) > 1:
                for token in crew.runner.take_back():
                    self._came_back(crew, token, now_s)

    def kill_all(self, fate: Outcome | None) -> None:
        """Kill every runner that is in a job; the jobs meet `fate` unless theirs is sealed already."""
        for crew in list(self.roster.crews.values()):
            for hold in crew.jobs.values():
                if hold.stop is None and fate is not None:
                    hold.stop = Stop(fate, DeathKind.DRAIN, tried=["SIGKILL"])
            if crew.jobs or fate is None:
                crew.runner.kill()

    def release_waiting(self, older_than_s: float, now_s: float) -> None:
        """Give back ready jobs that found no runner for so long: somebody else may be free."""
        while self.ready and now_s - self.ready[0].queued_s >= older_than_s:
            hold = self.ready.popleft()
            self._outbox.give_back(hold.job.job_id, hold.token, hold.job.queue)

    def take_notes(self, now_s: float) -> list[Progress]:
        """Give what running jobs said of themselves since the last time."""
        at = time.time() - now_s
        notes = []
        for token, crew in self.given.items():
            hold = crew.jobs.get(token)
            if hold is not None and hold.changed:
                hold.changed = False
                mark = hold.progress or ProgressMark()
                busy = at + hold.silent_since_s if hold.silent_since_s else None
                said = at + (hold.last_heartbeat_s or hold.sent_s)
                notes.append(Progress(hold.job.job_id, token, said, mark.done, mark.total, mark.message, busy))
        return notes

    def take_news(self) -> list[tuple[EventKind, int, str]]:
        """Give what people should hear of running jobs."""
        news, self._news = self._news, []
        return news

    # Reading ----------------------------------------------------------------------------------

    def _reader(self, crew: Slot) -> Callable[[int], None]:
        return lambda events: self._read_runner(crew, events)

    def _sign_reader(self, crew: Slot) -> Callable[[int], None]:
        return lambda _events: self._take_signs(crew)

    def _watch_writing(self, crew: Slot) -> None:
        if crew.gone_s is None:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if crew.runner.wants_write() else 0)
            key = self._selector.get_key(crew.runner)
            if key.events != wanted:
                self._selector.modify(crew.runner, wanted, key.data)

    def _read_runner(self, crew: Slot, events: int) -> None:
        if crew.gone_s is not None:
            return
        if events & selectors.EVENT_WRITE:
            crew.runner.flush()
            self._watch_writing(crew)
        if events & selectors.EVENT_READ:
            self._gather(crew)
            if crew.runner.closed:
                self._saw_gone(crew)

    def _gather(self, crew: Slot) -> None:
        self._take_reports(crew)
        if not crew.jobs and not crew.shared and not crew.retiring:
            self._recycle_if_due(crew, host.boottime_s())

    def _take_signs(self, crew: Slot) -> None:
        signs = crew.runner.read_signs()
        if not signs and crew.gone_s is None:
            # Readable and empty: user code closed its end, and nothing will ever come.
            self._selector.unregister(crew.runner.signs)
        for sign in signs:
            if sign.noted:
                crew.runner.stacks.heard(sign.token)
                crew.look_at_s = self.look_at_s = 0.0  # a job may wait for this to be stopped
                continue
            if sign.blocks:
                self._note_blocker(crew, BlockedLoop(sign.token, sign.at_s, host.boottime_s()))
                continue
            hold = crew.jobs.get(sign.token)
            if hold is None:
                continue
            hold.last_heartbeat_s = max(hold.last_heartbeat_s, sign.at_s)
            if sign.is_progress:
                at = time.time() - (host.boottime_s() - sign.at_s)
                hold.progress = ProgressMark(sign.done, sign.total, sign.message or "", round(at, 3))
                hold.changed = True
                if self.roster.words is not None:
                    self.roster.words.note_progress(hold.job.job_id, hold.token, hold.progress)

    def _note_blocker(self, crew: Slot, blocker: BlockedLoop) -> None:
        """Note who keeps a loop from turning, and tell people of it once where it takes long."""
        told = crew.blocker is not None and crew.blocker.told and crew.blocker.since_s == blocker.since_s
        hold = crew.jobs.get(blocker.token)
        if not told and hold is not None and len(crew.jobs) > 1 and blocker.for_s > self._silent_s:
            told = True
            others = len(crew.jobs) - 1
            text = (
                f"It has kept the event loop that it shares with {others} other job{'' if others == 1 else 's'} from "
                f"turning for {brief(blocker.for_s)}"
            )
            log.warning("A job blocks the event loop that others share", job_id=hold.job.job_id, task=hold.job.task)
            self._news.append((EventKind.LOOP_BLOCKED, hold.job.job_id, text))
        crew.blocker = replace(blocker, told=told)

    def _recycle_if_due(self, crew: Slot, now_s: float) -> None:
        settings = self._settings
        due = crew.alone or 0 < settings.recycle_after_jobs <= crew.ended
        if not due and settings.recycle_over_memory_bytes:
            due = crew.outgrew(settings.recycle_over_memory_bytes, now_s)
        if due:
            self._retire(crew)

    def _retire(self, crew: Slot) -> None:
        crew.retiring = True
        crew.runner.retire()

    # Watching ---------------------------------------------------------------------------------

    def _check_crew(self, crew: Slot, now_s: float) -> None:
        crew.runner.trim_output()
        self._keep_words(crew)
        sent_s = next(iter(crew.jobs.values())).sent_s
        if crew.runner.pid is None and now_s - self._pauses.excuse(sent_s) > BIRTH_S:
            self._miss_birth(crew, now_s)
            return
        if crew.is_async:
            holds = list(crew.jobs.values())
        else:
            if len(crew.jobs) > 1 and now_s - crew.since_s > self._pace.slow_s():
                # Whoever waits behind a long job can be served elsewhere.
                for token in crew.runner.take_back():
                    self._came_back(crew, token, now_s)
            holds = list(crew.jobs.values())[:1]
        pulse_s = self._trace.last_pulse_s(crew.slot)
        self._measure_memory(crew, holds, now_s)
        if not self._is_awake(crew, pulse_s, now_s):
            return
        for hold in holds:
            since = self._moments(crew, hold, pulse_s, now_s)
            self._check_hold(crew, hold, since, now_s)
            if not crew.jobs or self._next_action(crew, hold, now_s):
                return
            # The limit of one that is being stopped is long past: looking at that would keep this loop spinning.
            stopping = hold.stop is not None
            wake_s = self._stopper.next_step_s(crew, hold) if stopping else limits.look_again_s(hold, since)
            crew.look_at_s = min(crew.look_at_s, max(wake_s, now_s))

    def _keep_words(self, crew: Slot) -> None:
        """Copy the end of what the present job of a runner printed to where others can read it if we are killed."""
        words = self.roster.words
        if words is None or crew.is_async:
            # Of an async runner only the jobs themselves know who of them printed what.
            return
        stdout, stderr = crew.runner.output_news(STREAM_BYTES)
        if stdout is not None or stderr is not None:
            hold = next(iter(crew.jobs.values()))
            words.note_output(hold.job.job_id, hold.token, stdout, stderr)
            words.note_memory(hold.token, crew.memory_bytes)

    def _is_awake(self, crew: Slot, pulse_s: float, now_s: float) -> bool:
        """Note when a runner can begin its first job; False when it took too long for that and was killed."""
        if not crew.ready_s and pulse_s >= crew.opened_s:
            crew.ready_s = pulse_s
        if crew.ready_s or crew.runner.pid is None:
            return True
        if now_s - self._pauses.excuse(crew.opened_s) <= self._bench.import_timeout_s:
            return True
        log.error("A runner does not begin and is killed", slot=crew.slot)
        crew.runner.kill()
        return False

    def _moments(self, crew: Slot, hold: HeldJob, pulse_s: float, now_s: float) -> limits.Moments:
        """Say from when on the limits of a job count: not before its process could begin it, and not while we slept."""
        began_s = max(hold.sent_s if crew.is_async else crew.since_s, crew.ready_s or now_s)
        excuse = self._pauses.excuse
        last_heartbeat_s, pulse_s = (
            max(now_s if hold.writing else hold.last_heartbeat_s, began_s),
            max(pulse_s, began_s),
        )
        return limits.Moments(excuse(began_s), excuse(last_heartbeat_s), excuse(pulse_s))

    def _measure_memory(self, crew: Slot, holds: list[HeldJob], now_s: float) -> None:
        if now_s < crew.measure_at_s or crew.runner.pid is None or now_s - crew.since_s < LOOK_S:
            return
        limit_bytes = holds[0].policy.memory_limit_bytes if holds and not crew.is_async else None
        weigh = host.memory_bytes if limit_bytes is None else host.family_memory_bytes
        # The dead weigh nothing: what it weighed before is what people will ask for.
        crew.memory_bytes = weigh(crew.runner.pid) or crew.memory_bytes
        wait_s = limits.measure_again_s(limit_bytes, crew.memory_bytes)
        crew.measure_at_s = limits.on_heartbeat(now_s + wait_s / 2, wait_s)
        if limit_bytes is not None:
            crew.look_at_s = min(crew.look_at_s, crew.measure_at_s)

    def _check_hold(self, crew: Slot, hold: HeldJob, since: limits.Moments, now_s: float) -> None:
        self._note_silence(hold, since.pulse_s, now_s)
        if hold.stop is not None:
            return
        found = limits.broken_limit(hold, since, now_s, crew.memory_bytes)
        if found is not None:
            fate, kind = found
            log.warning("Ending a job that broke a limit", job_id=hold.job.job_id, task=hold.job.task, limit=kind)
            self.stop(hold.token, fate, kind, now_s)
            return
        stop_at_s = must_stop_at_s(hold, self._confirmed_s)
        if stop_at_s is not None and now_s > stop_at_s:
            log.error("Stopping a job: no beat was confirmed before its lease ended", job_id=hold.job.job_id)
            fate = Died("lease ran out: the ledger could not be reached", counts=False)
            self.stop(hold.token, fate, DeathKind.LEASE, now_s)

    def _note_silence(self, hold: HeldJob, pulse_s: float, now_s: float) -> None:
        """Show, and nothing more, that no Python code runs in a process: C code may take as long as it needs."""
        silent = now_s - pulse_s > self._silent_s
        if silent != bool(hold.silent_since_s):
            hold.silent_since_s = pulse_s if silent else 0.0
            hold.changed = True

    def _next_action(self, crew: Slot, hold: HeldJob, now_s: float) -> bool:
        """Take the next step to end a job; True when its runner was killed for it."""
        if not self._stopper.press(crew, hold, now_s):
            return False
        if crew.is_async:
            assign_blame(crew, hold, self._trace.last_pulse_s(crew.slot), self._silent_s, now_s)
        crew.runner.kill()
        return True
