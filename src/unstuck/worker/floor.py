"""The shop floor: one loop that feeds runners, gathers what ended and sends the wheel round.

It runs in the main thread and never waits for the ledger: turns are done by the wheel's thread, beats by
the heartbeat's. User code is in other processes, so nothing here can be blocked by it.
"""

import selectors
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import structlog

from unstuck import failpoints, host
from unstuck.config import Settings
from unstuck.domain.endings import Release
from unstuck.domain.outcomes import Cancelled, Died, Overran, Raised, Succeeded
from unstuck.domain.policy import decode_policy
from unstuck.domain.recovery import conclude
from unstuck.domain.states import JobState, WorkerState
from unstuck.runner.tasks import Manifest
from unstuck.runner.trace import Trace
from unstuck.store.records import Claimed, Done, Held, HeldJob, Output, Pulse, Turn, Wish
from unstuck.worker.bench import Bench, Finished, NurseryGone, RunnerBorn, RunnerExit
from unstuck.worker.fencing import must_stop_at_s
from unstuck.worker.heartbeat import Beaten, Heartbeat, Rung
from unstuck.worker.holds import Hold
from unstuck.worker.mailbox import Mailbox
from unstuck.worker.outbox import Outbox
from unstuck.worker.pace import Pace
from unstuck.worker.roster import Crew, Roster
from unstuck.worker.wheel import HeldAnswer, TurnDone, TurnUncertain, Wheel

BUSY_TICK_S = 0.1
IDLE_TICK_S = 1.0
WAIT_FOR_STATUS_S = 0.25
"""How long to wait for a dead runner's exit status once its death is certain."""
MAX_WAIT_IN_HAND_S = 1.0
"""A job that found no slot for so long goes back: somebody else may be free."""
SLOW_HEAD_S = 0.05
"""A runner whose first job takes longer gives back what was queued behind it."""
STOP_GRACE_S = 5.0
"""How long an async job may take to obey its cancellation before its runner is killed."""
BEATS_PER_COMPARISON = 3
MEMORY_LOOK_S = 1.0
LAST_WORDS_S = 10.0
"""How long a drained worker tries on to hand in its last outcomes."""

log = structlog.get_logger("unstuck.worker")


@dataclass
class Drain:
    """A shutdown under way."""

    deadline_s: float | None
    """None: jobs may take as long as they need."""
    killed: bool = False


class Floor:
    def __init__(
        self,
        *,
        worker_id: str,
        bench: Bench,
        trace: Trace,
        manifest: Manifest,
        settings: Settings,
        queues: tuple[str, ...],
        slots: int,
        mailbox: Mailbox,
        wheel: Wheel,
        born_s: float,
    ) -> None:
        self._worker_id = worker_id
        self._bench = bench
        self._trace = trace
        self._settings = settings
        self._queues = queues
        self._slots = slots
        self._mailbox = mailbox
        self._wheel = wheel
        self._heartbeat: Heartbeat | None = None
        self._tasks = tuple(task.name for task in manifest.tasks)
        self._async_tasks = frozenset(task.name for task in manifest.tasks if task.is_async)
        self._any_retry = any(task.policy.on_crash == "retry" for task in manifest.tasks)
        self._roster = Roster(bench, slots, trace)
        self._pace = Pace()
        self._outbox = Outbox()
        self._hand: deque[Hold] = deque()
        self._starting: dict[int, Hold] = {}
        self._ready: deque[Hold] = deque()
        self._given: dict[int, Crew] = {}
        self._asked: Turn | None = None
        self._comparing = False
        self._uncertain: Turn | None = None
        self._compare_wanted = False
        self._rung = True
        self._look_at_s = 0.0
        self._confirmed_s = born_s
        self._beats = 0
        self._processed = 0
        self._ended_since_turn = 0
        self._turned_s = born_s
        self._drain: Drain | None = None
        self._declared_dead = False
        self._give_up_s: float | None = None
        self._selector = selectors.DefaultSelector()
        self._selector.register(mailbox, selectors.EVENT_READ, self._read_mail)
        self._selector.register(bench, selectors.EVENT_READ, self._read_bench)

    # What others call -------------------------------------------------------------------------

    def attach(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat

    def pulse(self) -> Pulse:
        """Say what a beat reports; called from the heartbeat's thread."""
        return Pulse(self._worker_id, len(self._given), self._processed)

    def run(self, signals: Callable[[], int]) -> bool:
        """Work until drained (True) or until the ledger declared this worker dead (False)."""
        signalled = 0
        while not self._declared_dead:
            for key, events in self._selector.select(self._patience_s()):
                key.data(events)
            if signals() > signalled:
                signalled = signals()
                self._on_signal(signalled)
            self._tick(host.boottime_s())
            self._feed()
            self._turn_if_due()
            if self._drain is not None and self._is_empty():
                break
        self._selector.close()
        return not self._declared_dead

    # Messages ---------------------------------------------------------------------------------

    def _read_mail(self, _events: int) -> None:
        for message in self._mailbox.take():
            match message:
                case TurnDone():
                    self._after_turn(message)
                case TurnUncertain():
                    self._after_uncertain_turn(message)
                case HeldAnswer():
                    self._after_comparison(message.held)
                case Beaten():
                    self._after_beat(message)
                case Rung():
                    self._rung = True
                case _:
                    raise AssertionError(f"unknown message {message!r}")

    def _after_beat(self, beaten: Beaten) -> None:
        answer = beaten.answer
        if answer.state in (WorkerState.DEAD, WorkerState.STOPPED):
            self._die()
            return
        self._confirmed_s = beaten.sent_s
        self._roster.renew_leases(beaten.sent_s)
        self._beats += 1
        if answer.was_suspect or self._beats % BEATS_PER_COMPARISON == 0:
            self._compare_wanted = True
        for job_id, token in answer.cancel:
            self._cancel(job_id, token)
        if answer.request is not None and self._drain is None:
            log.info(f"An operator asked this worker to {answer.request}")
            self.drain(None if answer.request == "drain" else self._settings.shutdown_grace_s)

    def _die(self) -> None:
        """The ledger gave our jobs away: nothing that we hold is ours any more."""
        log.error("This worker was declared dead; killing what it holds and coming back under a new id")
        for crew in list(self._roster.crews.values()):
            crew.runner.kill()
        self._declared_dead = True

    # Turns ------------------------------------------------------------------------------------

    def _turn_if_due(self) -> None:
        if self._asked is not None or self._comparing or self._declared_dead:
            return
        if self._uncertain is not None or self._compare_wanted:
            self._comparing = True
            self._compare_wanted = False
            self._wheel.compare()
            return
        start = self._choose_start()
        now_s = host.boottime_s()
        wish = self._wish(now_s, len(start), busy=bool(start or len(self._outbox)))
        if wish is not None:
            self._rung = False
        if wish is not None or now_s >= self._look_at_s:
            self._look_at_s = now_s + self._settings.poll_interval_s
        if not start and wish is None and not len(self._outbox):
            return
        if failpoints.active and (self._outbox.done or self._outbox.endings):
            failpoints.reached("worker.before_settle")
        self._asked = self._outbox.turn(self._worker_id, start, wish)
        self._wheel.turn(self._asked)

    def _choose_start(self) -> tuple[Held, ...]:
        free = self._roster.free() - len(self._starting) - len(self._ready)
        chosen = []
        while self._hand and free > 0:
            hold = self._hand.popleft()
            self._starting[hold.token] = hold
            chosen.append(Held(hold.job.job_id, hold.token))
            free -= 1
        return tuple(chosen)

    def _wish(self, now_s: float, starting: int, *, busy: bool) -> Wish | None:
        if self._drain is not None or not (busy or self._rung or now_s >= self._look_at_s):
            return None
        # Who cannot confirm a beat must not take on more.
        if now_s - self._confirmed_s > self._settings.recovery.heartbeat_timeout_s / 2:
            return None
        depth = self._pace.depth() if self._any_retry else 0
        room = self._roster.free() - len(self._starting) - len(self._ready) - len(self._hand)
        room += self._pace.lookahead(self._slots) + self._roster.ahead_room(depth)
        if room <= 0:
            return None
        return Wish(self._queues, self._tasks, min(room, 1_000), run_ahead=self._any_retry)

    def _after_turn(self, message: TurnDone) -> None:
        turn, answer = message.turn, message.answer
        self._asked = None
        if not answer.alive:
            self._die()
            return
        now_s = host.boottime_s()
        self._pace.saw_turn(message.duration_s)
        self._pace.saw_ends(self._ended_since_turn, now_s - self._turned_s)
        self._ended_since_turn, self._turned_s = 0, now_s
        if answer.superseded:
            self._forget_superseded(answer.superseded, turn)
        if failpoints.active and turn.start:
            failpoints.reached("worker.after_start")
        for held in turn.start:
            hold = self._starting.pop(held.token, None)
            if hold is not None and (held.job_id, held.token) not in answer.superseded:
                self._ready.append(hold)
        if failpoints.active and answer.claimed:
            failpoints.reached("worker.after_claim")
        for job in answer.claimed:
            (self._ready if job.running else self._hand).append(self._hold(job, now_s))
        if turn.wish is not None:
            if len(answer.claimed) >= turn.wish.limit:
                self._rung = True  # There was more than we asked for.
            elif answer.next_due_in_s is not None and self._heartbeat is not None:
                self._heartbeat.promote_in(answer.next_due_in_s)

    def _hold(self, job: Claimed, now_s: float) -> Hold:
        policy = decode_policy(job.policy)
        if not policy.heartbeat:
            lease_s = None
        elif policy.heartbeat_timeout_s is not None:
            lease_s = policy.heartbeat_timeout_s
        else:
            lease_s = self._settings.recovery.running_stale_after_s
        return Hold(job, policy, job.task in self._async_tasks, lease_s, now_s)

    def _forget_superseded(self, superseded: frozenset[tuple[int, int]], turn: Turn) -> None:
        for job_id, token in superseded:
            log.warning("Refused by the ledger: this attempt was superseded", job_id=job_id, token=token)
            self._starting.pop(token, None)

    def _after_uncertain_turn(self, message: TurnUncertain) -> None:
        log.warning("The answer of a turn was lost; comparing with the ledger", error=message.error)
        self._asked = None
        self._uncertain = message.turn

    def _after_comparison(self, held: list[HeldJob]) -> None:
        """Make our list and the ledger's the same."""
        self._comparing = False
        theirs = {item.token: item for item in held}
        now_s = host.boottime_s()
        turn, self._uncertain = self._uncertain, None
        if turn is not None:
            self._outbox.put_back(turn, set(theirs))
            self._resolve_started(turn, theirs)
            self._rung = True
        ours = self._outbox.tokens() | set(self._given) | {hold.token for hold in (*self._hand, *self._ready)}
        for token, item in theirs.items():
            if token not in ours:
                log.info("Giving back a job that we did not know we hold", job_id=item.job_id)
                self._outbox.releases.append(Release(item.job_id, token))
        self._hand = deque(hold for hold in self._hand if hold.token in theirs)
        self._ready = deque(hold for hold in self._ready if hold.token in theirs)
        for token in [token for token in self._given if token not in theirs]:
            self._stop_superseded(token, now_s)

    def _resolve_started(self, turn: Turn, theirs: dict[int, HeldJob]) -> None:
        for held in turn.start:
            hold = self._starting.pop(held.token, None)
            there = theirs.get(held.token)
            if hold is None or there is None:
                continue
            if there.state is JobState.RUNNING:
                self._ready.append(hold)
            else:
                self._hand.appendleft(hold)

    # Runners ----------------------------------------------------------------------------------

    def _feed(self) -> None:
        """Give every ready job to a runner that can take it."""
        if self._ready:
            now_s = host.boottime_s()
            depth = self._pace.depth() if self._any_retry else 0
            waiting: deque[Hold] = deque()
            for hold in self._ready:
                crew = self._roster.place(hold, now_s, depth)
                if crew is None:
                    waiting.append(hold)
                else:
                    self._given[hold.token] = crew
            self._ready = waiting
        for crew in self._roster.opened:
            self._selector.register(crew.runner, selectors.EVENT_READ, self._reader(crew))
        self._roster.opened.clear()
        for crew in list(self._roster.crews.values()):
            if crew.to_send:
                holds, crew.to_send = crew.to_send, []
                self._roster.renew_lease(crew, self._confirmed_s)
                crew.runner.send([hold.frame() for hold in holds])
                self._watch_writing(crew)

    def _reader(self, crew: Crew) -> Callable[[int], None]:
        return lambda events: self._read_runner(crew, events)

    def _watch_writing(self, crew: Crew) -> None:
        if crew.gone_s is None:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if crew.runner.wants_write() else 0)
            key = self._selector.get_key(crew.runner)
            if key.events != wanted:
                self._selector.modify(crew.runner, wanted, key.data)

    def _read_runner(self, crew: Crew, events: int) -> None:
        if crew.gone_s is not None:
            return
        if events & selectors.EVENT_WRITE:
            crew.runner.flush()
            self._watch_writing(crew)
        if events & selectors.EVENT_READ:
            self._take_ended(crew, crew.runner.read())
            if crew.runner.closed:
                self._saw_gone(crew)

    def _take_ended(self, crew: Crew, finished: list[Finished]) -> None:
        if not finished:
            return
        now_s = host.boottime_s()
        if not crew.is_async:
            self._pace.saw_sync_jobs(len(finished), now_s - crew.since_s)
            crew.since_s = now_s
        for item in finished:
            hold = self._roster.take_off(crew, item.token)
            if hold is None or self._given.pop(item.token, None) is None:
                continue  # Superseded meanwhile: nobody wants its outcome any more.
            self._conclude(hold, item)
        crew.ended += len(finished)
        if not crew.jobs and not crew.is_async:
            self._recycle_if_due(crew, now_s)

    def _conclude(self, hold: Hold, item: Finished) -> None:
        job, outcome = hold.job, item.outcome
        if isinstance(outcome, Succeeded):
            self._outbox.done.append(Done(job.job_id, job.token, outcome.result))
        elif isinstance(outcome, Cancelled):
            # Without a fate of ours, user code raised CancelledError by itself.
            fate = hold.fate or Raised("CancelledError", "The task cancelled itself", "")
            self._outbox.endings.append(conclude(hold.attempt(), fate))
        else:
            self._outbox.endings.append(conclude(hold.attempt(), outcome))
        if item.stdout or item.stderr:
            self._outbox.put_output(Output(job.job_id, job.token, item.stdout, item.stderr))
        self._processed += 1
        self._ended_since_turn += 1

    def _recycle_if_due(self, crew: Crew, now_s: float) -> None:
        settings = self._settings
        due = 0 < settings.recycle_after_jobs <= crew.ended
        if not due and settings.recycle_over_memory_bytes and now_s - crew.weighed_s > MEMORY_LOOK_S:
            crew.weighed_s = now_s
            pid = crew.runner.pid
            due = pid is not None and host.memory_bytes(pid) > settings.recycle_over_memory_bytes
        if due:
            crew.retiring = True
            crew.runner.retire()

    # Deaths -----------------------------------------------------------------------------------

    def _read_bench(self, _events: int) -> None:
        for report in self._bench.read():
            match report:
                case RunnerBorn():
                    self._watch_process(report)
                case RunnerExit():
                    crew = self._roster.crews.get(report.slot)
                    if crew is not None and crew.runner.pid in (report.pid, None):
                        self._bury(crew, report.cause)
                case NurseryGone():
                    self._replace_nursery(report.cause)

    def _watch_process(self, born: RunnerBorn) -> None:
        crew = self._roster.crews.get(born.slot)
        if crew is None or crew.runner.pid != born.pid or crew.pidfd is not None:
            return
        crew.pidfd = crew.runner.pidfd()
        if crew.pidfd is not None:
            self._selector.register(crew.pidfd, selectors.EVENT_READ, lambda _events: self._saw_gone(crew))

    def _saw_gone(self, crew: Crew) -> None:
        """The kernel says that it is gone; how it died is told by the nursery in a moment."""
        if crew.gone_s is None:
            crew.gone_s = host.boottime_s()
            self._unwatch(crew)

    def _unwatch(self, crew: Crew) -> None:
        for watched in (crew.runner, crew.pidfd):
            if watched is not None:
                try:
                    self._selector.unregister(watched)
                except (KeyError, ValueError):
                    pass
        crew.pidfd = None

    def _bury(self, crew: Crew, cause: str) -> None:
        """Settle what a dead runner held: what it finished, what it never entered, and what it died in."""
        if crew.slot in self._roster.crews and self._roster.crews[crew.slot] is not crew:
            return
        self._saw_gone(crew)
        self._take_ended(crew, crew.runner.read())
        now_s = host.boottime_s()
        unsent = {hold.token for hold in crew.to_send}
        crew.to_send.clear()
        never_entered = unsent | (set() if crew.is_async else set(crew.runner.retract()))
        stdout, stderr = crew.runner.last_output()
        back: list[Hold] = []
        for token in list(crew.jobs):
            hold = self._roster.take_off(crew, token)
            if hold is None or self._given.pop(token, None) is None:
                continue
            if token in never_entered and hold.fate is None:
                hold.taken_s = now_s
                back.append(hold)
                continue
            outcome = hold.fate if hold.fate is not None else Died(cause)
            if hold.fate is None:
                log.error("Worker died unexpectedly", job_id=hold.job.job_id, task=hold.job.task, cause=cause)
            self._outbox.endings.append(conclude(hold.attempt(), outcome))
            if not crew.is_async:
                self._outbox.put_output(Output(hold.job.job_id, token, stdout, stderr))
            self._processed += 1
        self._ready.extendleft(reversed(back))
        self._roster.remove(crew)
        crew.runner.close()

    def _replace_nursery(self, cause: str) -> None:
        log.error("The nursery died; starting another", cause=cause)
        self._selector.unregister(self._bench)
        for crew in list(self._roster.crews.values()):
            crew.runner.kill()
            self._bury(crew, f"its nursery died ({cause})")
        self._bench.close()
        self._bench.start()
        self._bench.equip(self._trace, self._worker_id)
        self._selector.register(self._bench, selectors.EVENT_READ, self._read_bench)

    # Stopping jobs ----------------------------------------------------------------------------

    def _stop(self, token: int, fate: Any, now_s: float) -> None:
        """End a job that we gave to a runner; what it becomes is written when it is really over."""
        crew = self._given.get(token)
        hold = None if crew is None else crew.jobs.get(token)
        if crew is None or hold is None or hold.fate is not None:
            return
        hold.fate = fate
        if crew.is_async:
            crew.runner.cancel(token)
            hold.stop_by_s = now_s + STOP_GRACE_S
            return
        retracted = crew.runner.retract()
        for other in retracted:
            self._came_back(crew, other, now_s)
        if token not in retracted:
            crew.runner.kill()

    def _came_back(self, crew: Crew, token: int, now_s: float) -> None:
        hold = self._roster.take_off(crew, token)
        if hold is None or self._given.pop(token, None) is None:
            return
        if hold.fate is not None:
            self._outbox.endings.append(conclude(hold.attempt(), hold.fate))
        elif self._drain is not None:
            self._outbox.releases.append(Release(hold.job.job_id, token))
        else:
            hold.taken_s = now_s
            self._ready.append(hold)

    def _stop_superseded(self, token: int, now_s: float) -> None:
        """Somebody else has this job now: stop ours, and want nothing of it."""
        crew = self._given.get(token)
        if crew is None:
            return
        hold = crew.jobs[token]
        log.warning("Stopping an attempt that was superseded", job_id=hold.job.job_id, token=token)
        self._stop(token, Died("superseded", counts=False), now_s)
        self._given.pop(token, None)

    def _cancel(self, job_id: int, token: int) -> None:
        crew = self._given.get(token)
        if crew is not None:
            crew.jobs[token].cancel_requested = True
            self._stop(token, Cancelled("cancelled by request while it ran"), host.boottime_s())
            return
        for waiting in (self._ready, self._hand):
            for hold in waiting:
                if hold.token == token:
                    waiting.remove(hold)
                    self._outbox.endings.append(conclude(hold.attempt(), Cancelled("cancelled by request")))
                    return

    # Time -------------------------------------------------------------------------------------

    def _patience_s(self) -> float:
        if self._asked is None and not self._comparing and (len(self._outbox) or self._compare_wanted):
            return 0.0
        now_s = host.boottime_s()
        tick_s = BUSY_TICK_S if self._given or self._hand or self._ready or self._drain else IDLE_TICK_S
        if self._asked is None and not self._comparing and self._drain is None:
            tick_s = min(tick_s, max(0.0, self._look_at_s - now_s))
        return tick_s

    def _tick(self, now_s: float) -> None:
        for crew in list(self._roster.crews.values()):
            if crew.gone_s is not None:
                if now_s - crew.gone_s > WAIT_FOR_STATUS_S:
                    self._bury(crew, "its process is gone; the exit status is unknown")
            elif crew.jobs:
                self._check_crew(crew, now_s)
        self._return_waiting(now_s)
        if self._drain is not None:
            self._press_drain(now_s)

    def _check_crew(self, crew: Crew, now_s: float) -> None:
        if not crew.is_async and len(crew.jobs) > 1:
            slow_s = max(SLOW_HEAD_S, 5 * (self._pace.sync_job_s or 0.0))
            if now_s - crew.since_s > slow_s:
                for token in crew.runner.retract():
                    self._came_back(crew, token, now_s)
        if not crew.is_async:
            crew.runner.trim_output()
        heads: Iterable[Hold] = crew.jobs.values() if crew.is_async else list(crew.jobs.values())[:1]
        for hold in list(heads):
            began_s = hold.given_s if crew.is_async else crew.since_s
            limit_s = hold.policy.timeout_s
            if limit_s is not None and now_s - began_s > limit_s:
                self._stop(hold.token, Overran(f"ran longer than its timeout of {limit_s:g}s"), now_s)
            stop_at_s = must_stop_at_s(hold, self._confirmed_s)
            if stop_at_s is not None and now_s > stop_at_s:
                log.error("Stopping a job: no beat was confirmed before its lease ended", job_id=hold.job.job_id)
                self._stop(hold.token, Died("lease ran out: the ledger could not be reached", counts=False), now_s)
            if hold.stop_by_s and now_s > hold.stop_by_s:
                self._kill_shared(crew, hold)
                return

    def _kill_shared(self, crew: Crew, stubborn: Hold) -> None:
        """An async job would not stop: the loop that it shares must go, and the others are not to blame."""
        for hold in crew.jobs.values():
            if hold.fate is None:
                why = f"its runner was ended because job {stubborn.job.job_id} would not stop"
                hold.fate = Died(why, counts=False)
            hold.stop_by_s = 0.0
        crew.runner.kill()

    def _return_waiting(self, now_s: float) -> None:
        for waiting in (self._hand, self._ready):
            while waiting and (self._drain is not None or now_s - waiting[0].taken_s > MAX_WAIT_IN_HAND_S):
                hold = waiting.popleft()
                self._outbox.releases.append(Release(hold.job.job_id, hold.token))

    # Shutdown ---------------------------------------------------------------------------------

    def _on_signal(self, count: int) -> None:
        if count == 1 or self._drain is None:
            log.info("Received shutdown signal, gracefully exiting...")
            self.drain(self._settings.shutdown_grace_s)
        else:
            log.warning("Received another shutdown signal, hurrying")
            self._drain.deadline_s = 0.0

    def drain(self, grace_s: float | None) -> None:
        """Take nothing new, let what runs end within the grace, then stop."""
        now_s = host.boottime_s()
        self._drain = Drain(None if grace_s is None else now_s + grace_s)
        if self._heartbeat is not None:
            self._heartbeat.announce_drain()
        for crew in list(self._roster.crews.values()):
            if not crew.is_async and len(crew.jobs) > 1:
                for token in crew.runner.retract():
                    self._came_back(crew, token, now_s)

    def _press_drain(self, now_s: float) -> None:
        drain = self._drain
        assert drain is not None
        if drain.deadline_s is None or now_s <= drain.deadline_s:
            return
        if not drain.killed:
            drain.killed = True
            self._give_up_s = now_s + LAST_WORDS_S
            cause = "drain: the worker was shut down and the job did not end within the grace"
            for crew in list(self._roster.crews.values()):
                for hold in crew.jobs.values():
                    hold.fate = hold.fate or Died(cause, counts=False, drained=True)
                if crew.jobs:
                    crew.runner.kill()

    def _is_empty(self) -> bool:
        if self._give_up_s is not None and host.boottime_s() > self._give_up_s:
            log.error("The ledger could not be reached; leaving the last outcomes to the reaper")
            return True
        busy = self._given or self._hand or self._ready or self._starting or len(self._outbox)
        return not busy and self._asked is None and self._uncertain is None and not self._comparing
