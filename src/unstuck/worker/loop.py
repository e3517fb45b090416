"""The worker loop: take messages, give jobs to runners, send turns, drain and stop."""

import selectors
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from unstuck import failpoints, host
from unstuck.config import Settings
from unstuck.domain.endings import Cancelled, Died, conclude
from unstuck.domain.states import JobState, WorkerState
from unstuck.errors import SchemaMismatch, UnstuckError
from unstuck.ledger.contract.workers import AttemptRef, Claimed, ClaimRequest, Heartbeat, HeldRecord, Turn
from unstuck.logs import logger
from unstuck.mailbox import Mailbox, ThreadFailed
from unstuck.metrics.counters import Counters
from unstuck.recovery.decide import attempt_of
from unstuck.runner.last_output import LastOutputFile
from unstuck.runner.status_page import StatusPage
from unstuck.runner.tasks import Manifest
from unstuck.worker.fork_client import ForkServerClient
from unstuck.worker.health import WorkerHealth
from unstuck.worker.heartbeat import HeartbeatThread
from unstuck.worker.held_jobs import HeldJob, PolicyCache
from unstuck.worker.job_metrics import JobMetrics
from unstuck.worker.ledger_thread import LedgerThread
from unstuck.worker.messages import (
    ComparisonDone,
    HeartbeatConfirmed,
    SchemaOutdated,
    StackRequested,
    TurnDone,
    TurnUncertain,
    WakeUp,
)
from unstuck.worker.outbox import Outbox
from unstuck.worker.pacing import Pace
from unstuck.worker.pool import RunnerPool
from unstuck.worker.stacks import StackReader
from unstuck.worker.unrecorded import UNREACHABLE, report_running, report_unrecorded, unrecorded_outcomes
from unstuck.worker.watchdog import ProgressClock

LAST_WORDS_S = 10.0
"""How long a drained worker tries on to hand in its last outcomes."""


@dataclass
class Drain:
    deadline_s: float | None
    """When what still runs is killed; None: jobs may take as long as they need."""
    give_up_s: float | None = None
    """When to leave the last outcomes to the reaper."""

    def hear_signal(self, now_s: float, grace_s: float) -> bool:
        """Take one more signal; True when it means to hurry. An operator's drain has no end: a signal gives it one."""
        hurry = self.deadline_s is not None
        self.deadline_s = 0.0 if hurry else now_s + grace_s
        return hurry

    def is_over(self, now_s: float) -> bool:
        """Say, once, that the grace is over and what still runs must be killed."""
        if self.deadline_s is None or now_s <= self.deadline_s or self.give_up_s is not None:
            return False
        self.give_up_s = now_s + LAST_WORDS_S
        return True

    def nothing_runs(self, now_s: float, grace_s: float) -> None:
        """Begin to count down: only outcomes are left, and whether they can be handed in is not known."""
        if self.give_up_s is None:
            self.give_up_s = now_s + min(LAST_WORDS_S, grace_s)

    def gives_up(self, now_s: float) -> bool:
        return self.give_up_s is not None and now_s > self.give_up_s


BUSY_TICK_S = 0.1
IDLE_TICK_S = 1.0
MAX_WAIT_IN_HAND_S = 0.3
"""A job that found no slot for so long goes back: somebody else may be free."""
MAX_CLAIM = 1_000
BEATS_PER_COMPARISON = 3
LOCKED_PAUSE_S = 0.2
"""Pause after a turn that other sessions' locks kept from starting or claiming anything."""
NOTE_S = 1.0
"""How often at most the ledger is told how far running jobs are."""

log = logger("unstuck.worker")


class WorkerLoop:
    def __init__(
        self,
        *,
        worker_id: str,
        fork_server: ForkServerClient,
        status_page: StatusPage,
        manifest: Manifest,
        settings: Settings,
        queues: tuple[str, ...],
        slots: int,
        mailbox: Mailbox,
        ledger_thread: LedgerThread,
        born_s: float,
        words: LastOutputFile | None = None,
        health: WorkerHealth | None = None,
        counters: Counters | None = None,
    ) -> None:
        self._worker_id = worker_id
        self._settings = settings
        # Read once: settings are written as people write them, and these are needed for every job.
        self._poll_interval_s = settings.poll_interval_s
        self._claim_until_s = settings.recovery.heartbeat_timeout_s / 2
        self._queues = queues
        self._slots = slots
        self._mailbox = mailbox
        self._ledger_thread = ledger_thread
        self._heartbeat: HeartbeatThread | None = None
        self._tasks = tuple(task.name for task in manifest.tasks)
        async_tasks = frozenset(task.name for task in manifest.tasks if task.is_async)
        recovery = settings.recovery
        self._policies = PolicyCache(
            recovery.running_stale_after_s, async_tasks, self._shorten_interval, recovery.claimed_stale_after_s
        )
        self._run_ahead = any(task.policy.on_crash == "retry" for task in manifest.tasks)
        self._pace = Pace()
        self._outbox = Outbox()
        self._selector = selectors.DefaultSelector()
        self._selector.register(mailbox, selectors.EVENT_READ, self._read_mail)
        self._health = health or WorkerHealth()
        self._metrics = JobMetrics(counters or Counters())
        self._runners = RunnerPool(
            fork_server,
            status_page,
            worker_id,
            settings,
            slots,
            self._selector,
            self._outbox,
            self._pace,
            self._metrics,
            self._saw_death,
        )
        self._runners.confirm(born_s)
        self._runners.slots.words = words
        self._jobs, self._recorder = self._runners.jobs, self._runners.recorder
        self._confirmed_s = born_s
        self._claimed: deque[HeldJob] = deque()
        """CLAIMED, waiting for a free slot."""
        self._starting: dict[int, HeldJob] = {}
        """Becoming RUNNING in the turn that is on its way."""
        self._forgotten: list[AttemptRef] = []
        """Begun here, and CLAIMED again by a ledger that forgot it: to become RUNNING once more."""
        self._asked: Turn | None = None
        self._handed_in: dict[int, int] = {}
        """By slot, the attempts whose ends are all known once the turn on its way is written."""
        self._uncertain: Turn | None = None
        self._comparing = False
        self._compare_wanted = False
        self._woken = True
        self._busy_until_s = 0.0
        """No turn before this: the last one could not even start or claim jobs."""
        self._look_at_s = 0.0
        self._turned_s = born_s
        self._note_at_s = 0.0
        self._beats = 0
        self._drain: Drain | None = None
        self._declared_dead = False
        self.outdated: SchemaMismatch | None = None
        """A newer version took away what this one needs of the tables: the worker leaves."""
        self._stacks = StackReader()
        self.movement = ProgressClock()

    # What others call -------------------------------------------------------------------------

    def attach(self, heartbeat: HeartbeatThread) -> None:
        self._heartbeat = heartbeat

    def _shorten_interval(self, interval_s: float) -> None:
        if self._heartbeat is not None:
            self._heartbeat.shorten_interval(interval_s)

    def _saw_death(self, job: Claimed, beside_since_s: float | None) -> tuple[int, int]:
        # What ended well since the last claim counts first.
        self._health.saw_processed(self._recorder.processed, host.boottime_s())
        died_here = self._health.died_here(job.job_id)
        if self._health.saw_death(job, beside_since_s=beside_since_s) and self._heartbeat is not None:
            # Before the next heartbeat is due: a reaper may switch this worker off.
            self._heartbeat.beat_soon()
        return self._health.in_a_row, died_here

    def pulse(self) -> Heartbeat:
        """Say what a beat reports; called from the heartbeat's thread."""
        return Heartbeat(self._worker_id, len(self._jobs.given), self._recorder.processed, self._health.news())

    def wants_a_turn(self) -> bool:
        """Say whether the wheel should go round: it was asked to, or nothing is done here and nothing forbids it."""
        now_s = host.boottime_s()
        may = now_s - self._confirmed_s <= self._claim_until_s and now_s >= self._runners.slots.rest_until_s
        return self._asked is not None or self._comparing or (may and not self._jobs.given and self._drain is None)

    def run(self, signals: Callable[[], int]) -> bool:
        """Work until drained (True) or until the ledger declared this worker dead (False)."""
        heeded = 0
        while not self._declared_dead:
            self.movement.moved("loop.step")
            for key, events in self._selector.select(self._patience_s()):
                key.data(events)
            if signals() > heeded:
                heeded = signals()
                self._on_signal()
            self._tick(host.boottime_s())
            self._runners.feed(self._depth())
            self._turn_if_due()
            if self._drain is not None and self._is_empty():
                break
        self._recorder.log.close()
        self._selector.close()
        return not self._declared_dead

    # Messages ---------------------------------------------------------------------------------

    def _read_mail(self, _events: int) -> None:
        for message in self._mailbox.take():
            match message:
                case TurnDone():
                    self._after_turn(message)
                case TurnUncertain():
                    if not message.again:
                        log.warning("The answer of a turn was lost; comparing with the ledger", error=message.error)
                    self._asked, self._uncertain = None, message.turn
                case SchemaOutdated():
                    self._leave_outdated(message.error)
                case ComparisonDone():
                    self._after_comparison(message.held)
                case HeartbeatConfirmed():
                    self._after_beat(message)
                case WakeUp():
                    self._woken = True
                case StackRequested():
                    self._stacks.ask(message, self._jobs.given.get(message.token))
                case ThreadFailed():
                    if isinstance(message.error, UnstuckError):
                        raise message.error
                    # A worker with a dead thread would live and do nothing: better to die loudly.
                    raise RuntimeError(f"the {message.what} of this worker broke") from message.error
                case _:
                    raise AssertionError(f"unknown message {message!r}")

    def _after_beat(self, beaten: HeartbeatConfirmed) -> None:
        answer = beaten.answer
        if answer.state in (WorkerState.DEAD, WorkerState.STOPPED):
            self._die()
            return
        self._confirmed_s = beaten.sent_s
        self._runners.confirm(beaten.sent_s)
        self._beats += 1
        self._health.after_beat(answer)
        if answer.was_suspect or self._beats % BEATS_PER_COMPARISON == 0:
            self._compare_wanted = True
        for _job_id, token in answer.cancel:
            self._cancel(token)
        if answer.request is not None and self._drain is None:
            log.info(f"An operator asked this worker to {answer.request}")
            self._begin_drain(None if answer.request == "drain" else self._settings.shutdown_grace_s)

    def _die(self) -> None:
        """The ledger gave our jobs away: nothing that we hold is ours any more."""
        if self._declared_dead:
            return
        log.error("This worker was declared dead; killing what it holds and coming back under a new id")
        self._runners.kill_all(None)
        self._declared_dead = True

    def _cancel(self, token: int) -> None:
        if self._runners.cancel(token):
            return
        for waiting in (self._jobs.ready, self._claimed):
            for held_job in waiting:
                if held_job.token == token:
                    waiting.remove(held_job)
                    self._recorder.cancelled_unbegun(held_job, Cancelled("cancelled by request"))
                    return

    # Turns ------------------------------------------------------------------------------------

    def _turn_if_due(self) -> None:
        if self._asked is not None or self._comparing or self._declared_dead:
            return
        if self._uncertain is not None or self._compare_wanted:
            self._comparing, self._compare_wanted = True, False
            self._ledger_thread.compare()
            return
        now_s = host.boottime_s()
        if now_s < self._busy_until_s:
            return
        self._outbox.take_up(now_s)
        start = self._choose_start()
        claim_request = self._wish(now_s, busy=bool(start or len(self._outbox)))
        if claim_request is not None:
            self._woken = False
        if claim_request is not None or now_s >= self._look_at_s:
            self._look_at_s = now_s + self._poll_interval_s
        if not start and claim_request is None and not len(self._outbox):
            return
        if failpoints.active and (self._outbox.done or self._outbox.endings):
            failpoints.reached("worker.before_settle")
        self._asked = self._outbox.turn(self._worker_id, start, claim_request)
        self._handed_in = self._runners.slots.entered_and_over() if self._outbox.is_empty else {}
        self._ledger_thread.turn(self._asked)

    def _free(self) -> int:
        return self._runners.slots.free() - len(self._starting) - len(self._jobs.ready)

    def _depth(self) -> int:
        return self._pace.depth() if self._run_ahead else 0

    def _choose_start(self) -> tuple[AttemptRef, ...]:
        free = self._free()
        chosen: list[AttemptRef] = []
        while self._claimed and len(chosen) < free:
            held_job = self._claimed.popleft()
            self._starting[held_job.token] = held_job
            chosen.append(AttemptRef(held_job.job.job_id, held_job.token))
        forgotten, self._forgotten = self._forgotten, []
        return (*chosen, *forgotten)

    def _wish(self, now_s: float, *, busy: bool) -> ClaimRequest | None:
        if self._drain is not None or not (busy or self._woken or now_s >= self._look_at_s):
            return None
        # Who cannot confirm a beat, or cannot start runners, must not take on more.
        if now_s - self._confirmed_s > self._claim_until_s or now_s < self._runners.slots.rest_until_s:
            return None
        self._health.saw_processed(self._recorder.processed, now_s)
        if self._health.hold_back(now_s, busy=busy):
            self._woken = True  # What called us is still there when the others have had their turn.
            return None
        withheld = self._health.withheld(self._slots, now_s)
        free = self._free() - len(self._claimed) - withheld
        ahead = 0
        if not withheld:
            ahead += self._pace.lookahead(self._slots, now_s)
            ahead += self._runners.slots.ahead_room(self._depth(), now_s - self._pace.slow_s())
        room = free + self._pace.may_run_ahead(ahead)
        if room <= 0:
            return None
        # What a slot waits for is started in the commit that claims it.
        return ClaimRequest(
            self._queues, self._tasks, min(room, MAX_CLAIM), run_ahead=self._run_ahead, start=max(0, free)
        )

    def _after_turn(self, message: TurnDone) -> None:
        turn, answer = message.turn, message.answer
        self._asked = None
        if not answer.alive:
            self._metrics.refused(turn)
            self._die()
            return
        self._metrics.written(turn, answer.superseded)
        now_s = host.boottime_s()
        self._outbox.written(turn)
        if message.deferred is None:
            self._runners.slots.note_settled(self._handed_in)
        else:
            self._defer(message, message.deferred, now_s)
        self._pace.saw_turn(message.duration_s)
        self._pace.saw_ends(self._recorder.take_ended(), now_s - self._turned_s, now_s)
        self._turned_s = now_s
        self._runners.journal_writer.after_turn(turn, answer.superseded, message.refused)
        for job_id, token in answer.superseded:
            log.warning("Refused by the ledger: this attempt was superseded", job_id=job_id, token=token)
            self._starting.pop(token, None)
            self._runners.stop_superseded(token, now_s)
        if failpoints.active and (turn.start or any(job.running for job in answer.claimed)):
            failpoints.reached("worker.after_start")
        if turn.release and self._heartbeat is not None:
            self._heartbeat.wake_queues(self._outbox.returned)
            self._outbox.returned = set()
        begun = (self._starting.pop(held.token, None) for held in turn.start)
        self._jobs.ready.extend(held_job for held_job in begun if held_job is not None)
        # What the ledger had forgotten is ended by the next comparison, unless it still runs.
        self._compare_wanted |= any(held.token in self._jobs.begun for held in turn.start)
        if failpoints.active and answer.claimed:
            failpoints.reached("worker.after_claim")
        ahead = 0
        for job in answer.claimed:
            held_job = self._policies.hold(job, now_s)
            ahead += held_job.retries_on_crash
            (self._jobs.ready if job.running else self._claimed).append(held_job)
        if answer.claimed:
            self._pace.saw_claimed(ahead, len(answer.claimed))
        if turn.claim_request is not None and (answer.more or len(answer.claimed) >= turn.claim_request.limit):
            self._woken = True  # There was more than we asked for, or than fits into an answer.
        if answer.next_due_in_s is not None and self._heartbeat is not None:
            self._heartbeat.promote_in(answer.next_due_in_s)

    def _defer(self, message: TurnDone, turn: Turn, now_s: float) -> None:
        """Keep for later what another session of the database locked; everything else goes on."""
        self._outbox.defer(turn, now_s, message.reasons)
        for held in turn.start:
            held_job = self._starting.pop(held.token, None)
            if held_job is not None:
                self._claimed.append(held_job)
        if turn.claim_request is not None or turn.start:
            self._woken = True
            self._busy_until_s = now_s + LOCKED_PAUSE_S

    def _after_comparison(self, held: list[HeldRecord]) -> None:
        """Make our list and the ledger's the same."""
        self._comparing = False
        theirs = {item.token: item for item in held}
        turn, self._uncertain = self._uncertain, None
        if turn is not None:
            self._runners.journal_writer.put_back(turn, set(theirs))
            self._metrics.written_or_lost(turn, theirs)
            self._resolve_started(turn, theirs)
            self._woken = True
        ready, given = self._jobs.ready, self._jobs.given
        ours = self._outbox.tokens() | set(given) | {held_job.token for held_job in (*self._claimed, *ready)}
        # What a runner is still in is handed in when it has ended: somebody else may take it then.
        ours |= self._jobs.being_stopped()
        for token, item in theirs.items():
            if item.state is JobState.CLAIMED and token in self._jobs.begun:
                # A failover to a server that lagged behind: what is only claimed cannot be ended.
                self._forgotten.append(AttemptRef(item.job_id, token))
            elif token not in ours:
                self._part_with(item)
        self._metrics.keep_only(theirs)
        unbegun = [held_job for held_job in ready if held_job.token in theirs]
        again = [held_job for held_job in unbegun if theirs[held_job.token].state is JobState.CLAIMED]
        self._claimed = deque((*again, *(held_job for held_job in self._claimed if held_job.token in theirs)))
        self._jobs.ready = deque(held_job for held_job in unbegun if held_job not in again)
        now_s = host.boottime_s()
        for token in [token for token in given if token not in theirs]:
            self._runners.stop_superseded(token, now_s)

    def _part_with(self, item: HeldRecord) -> None:
        """End an attempt that the ledger says is ours, and that we know nothing of, or no longer."""
        if item.token not in self._jobs.begun:
            log.info("Giving back a job that we did not know we hold", job_id=item.job_id)
            self._outbox.give_back(item.job_id, item.token, item.queue)
            return
        # The ledger said before that it was not ours, or that it had ended: a server that lags behind, or a failover
        # to one, says such things. Its code has begun, so to give it back for free would run it twice.
        log.error("Handing in as crashed a job that the ledger had taken from us for a while", job_id=item.job_id)
        cause = (
            "its worker had stopped it, or written its end, and the ledger forgot that: the ledger said for a while "
            "that it was not ours (a failover to a server that lagged behind?)"
        )
        self._outbox.endings.append(conclude(attempt_of(item), Died(cause, counts=False)))

    def _resolve_started(self, turn: Turn, theirs: dict[int, HeldRecord]) -> None:
        for held in turn.start:
            held_job = self._starting.pop(held.token, None)
            there = theirs.get(held.token)
            if held_job is None or there is None:
                continue
            if there.state is JobState.RUNNING:
                self._jobs.ready.append(held_job)
            else:
                self._claimed.appendleft(held_job)

    # Time -------------------------------------------------------------------------------------

    def _patience_s(self) -> float:
        now_s = host.boottime_s()
        waiting_for_ledger = self._asked is not None or self._comparing or now_s < self._busy_until_s
        if not waiting_for_ledger and (len(self._outbox) or self._compare_wanted or self._uncertain is not None):
            return 0.0
        busy = self._jobs.given or self._claimed or self._jobs.ready or self._drain is not None
        tick_s = IDLE_TICK_S
        if busy:
            tick_s = max(0.0, min(BUSY_TICK_S, self._runners.slots.look_at_s - now_s))
        again_s = self._busy_until_s if now_s < self._busy_until_s else self._outbox.next_s()
        if again_s is not None and self._asked is None and not self._comparing:
            tick_s = min(tick_s, max(0.0, again_s - now_s))
        if not waiting_for_ledger and self._drain is None:
            tick_s = self._health.wait_s(now_s, min(tick_s, max(0.0, self._look_at_s - now_s)))
        return tick_s

    def _tick(self, now_s: float) -> None:
        self._runners.tick(now_s)
        self._recorder.log.tend(now_s)
        if now_s >= self._note_at_s and self._heartbeat is not None:
            self._note_at_s = now_s + NOTE_S
            if notes := self._runners.take_notes(now_s):
                self._heartbeat.report_progress(notes)
            if late := self._outbox.take_late(now_s):
                self._heartbeat.note_deferred_soon(late)
        if (news := self._stacks.take(now_s) + self._runners.reader.take_news()) and self._heartbeat is not None:
            self._heartbeat.report_events(news)
        patience_s = MAX_WAIT_IN_HAND_S if self._drain is None else 0.0
        self._runners.release_waiting(patience_s, now_s)
        while self._claimed and now_s - self._claimed[0].queued_s >= patience_s:
            held_job = self._claimed.popleft()
            self._outbox.give_back(held_job.job.job_id, held_job.token, held_job.job.queue)
        if self._drain is not None and self._drain.is_over(now_s):
            cause = "drain: the worker was shut down and the job did not end within the grace"
            self._runners.kill_all(Died(cause, counts=False, drained=True))

    # Shutdown ---------------------------------------------------------------------------------

    def _on_signal(self) -> None:
        if self._drain is None:
            log.info("Received shutdown signal, gracefully exiting...")
            self._begin_drain(self._settings.shutdown_grace_s)
        elif self._drain.hear_signal(host.boottime_s(), self._settings.shutdown_grace_s):
            log.warning("Received another shutdown signal, hurrying")

    def _begin_drain(self, grace_s: float | None) -> None:
        """Take nothing new, let what runs end within the grace, then stop."""
        self._drain = Drain(None if grace_s is None else host.boottime_s() + grace_s)
        self.movement.leaving = True
        if self._heartbeat is not None:
            self._heartbeat.announce_drain()
        self._runners.retract_all()

    def _leave_outdated(self, error: SchemaMismatch) -> None:
        """Take nothing new, let what runs end, and go on trying to hand in what ended: a migration of several files
        may bring back what is missing."""
        if self.outdated is None:
            log.error("The tables of the ledger no longer work with this version; draining", error=str(error))
        self.outdated = error
        if self._drain is None:
            self._begin_drain(self._settings.shutdown_grace_s)

    def _is_empty(self) -> bool:
        assert self._drain is not None
        now_s = host.boottime_s()
        if self.outdated is not None and not self._jobs.given:
            self._drain.nothing_runs(now_s, self._settings.shutdown_grace_s)
        if self._drain.gives_up(now_s):
            why = UNREACHABLE if self.outdated is None else str(self.outdated)
            report_unrecorded(unrecorded_outcomes(self._outbox, (self._asked, self._uncertain), why))
            report_running(self._jobs.job_ids())
            if self.outdated is not None:
                raise self.outdated
            return True
        busy = self._jobs.given or self._claimed or self._jobs.ready or self._starting or not self._outbox.is_empty
        return not busy and self._asked is None and self._uncertain is None and not self._comparing
