"""Play a worker: it registers, sends heartbeats, takes turns, runs jobs, fences itself, and reaps others.

The rules are the product's own: `fencing`, `Outbox`, `PolicyCache`, `LedgerThread`, `conclude`, `Loop`, `Scheduler`.
What is played here is the order of things in `worker/loop.py` and `worker/heartbeat.py`.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from tests.simulation.network import NetworkLink
from tests.simulation.runner import Exit, Runner
from tests.simulation.scenario import WorkerPlan
from tests.simulation.scheduler import NoMailbox, Pause, Process, Task, stand_on

from unstuck import host
from unstuck.config import Recovery
from unstuck.domain.endings import Cancelled, Died, Outcome, Overran, Succeeded, conclude
from unstuck.domain.liveness import Detector
from unstuck.domain.states import JobState, WorkerState
from unstuck.errors import LedgerError, LedgerUnavailable
from unstuck.ledger.contract.jobs import TaskRecord
from unstuck.ledger.contract.workers import (
    AttemptRef,
    ClaimRequest,
    Heartbeat,
    HeartbeatAnswer,
    HeldRecord,
    NewWorker,
    Success,
    Turn,
)
from unstuck.maintenance.loop import Loop
from unstuck.maintenance.scheduler import FIRST_PAUSE_S as SCHEDULE_PAUSE_S
from unstuck.maintenance.scheduler import Scheduler
from unstuck.recovery.decide import attempt_of
from unstuck.recovery.reap import Reaper
from unstuck.worker.heartbeat import FIRST_PAUSE_S, LONGEST_PAUSE_S
from unstuck.worker.held_jobs import HeldJob, PolicyCache
from unstuck.worker.ledger_thread import LedgerThread
from unstuck.worker.limits import may_begin, must_stop_at_s
from unstuck.worker.loop import BEATS_PER_COMPARISON, LOCKED_PAUSE_S, MAX_WAIT_IN_HAND_S
from unstuck.worker.messages import TurnDone, TurnUncertain
from unstuck.worker.outbox import Outbox

if TYPE_CHECKING:
    from tests.simulation.world import World

TASK = "t"
QUEUE = "default"
AHEAD = 1
"""How many jobs a worker claims beyond its free slots."""
LEAST_NAP_S = 0.0005
"""Shorter waits may be lost in the rounding of clocks, and time would stand still."""


class Worker:
    """A place in the fleet: one process at a time, replaced after its death by its supervisor."""

    def __init__(self, world: "World", number: int, plan: WorkerPlan) -> None:
        self.world = world
        self.number = number
        self.plan = plan
        self.machine = world.machine_of_worker(number, plan.machine)
        self.life: WorkerProcess | None = None

    @property
    def up(self) -> bool:
        return self.life is not None and self.life.process.alive

    def start(self) -> None:
        """Begin a new process, unless one runs."""
        if not self.up:
            self.life = WorkerProcess(self)

    def crash(self) -> None:
        """Kill the worker; its fork server notices and ends with all runners."""
        if self.life is not None:
            self.life.crash()


class WorkerProcess:
    """One process of a worker, under one id after the other."""

    def __init__(self, place: Worker) -> None:
        self.place = place
        self.world = place.world
        self.scenario = self.world.scenario
        self.process: Process = self.world.new_process(f"worker{place.number}", place.machine)
        self.fork_server: Process = self.world.new_process(f"fork server{place.number}", place.machine)
        self.road: NetworkLink = self.world.new_road(self.process)
        self.road.on_lost = self._reconnect
        self.given: dict[int, Runner] = {}
        self.entered: set[int] = set()
        """Attempts whose code began here: what the shared memory of a worker tells after its death."""
        self.draining = False
        self._begin_anew()
        self.process.spawn("main", self._main)
        self.leases = self.fork_server.spawn("leases", self._watch_leases)

    def _begin_anew(self) -> None:
        self.id = self.world.new_worker_id(self.place.number)
        self.hand: list[HeldJob] = []
        self.ready: list[HeldJob] = []
        self.starting: dict[int, HeldJob] = {}
        self.forgotten: list[AttemptRef] = []
        self.outbox = Outbox()
        recovery = self.world.recovery
        self.terms = PolicyCache(
            recovery.running_stale_after_s, frozenset(), self._quicken, recovery.claimed_stale_after_s
        )
        self.interval_s = self.scenario.interval_s
        self.confirmed_s = 0.0
        self.uncertain: Turn | None = None
        self.compare_wanted = False
        self.beats = 0
        self.processed = 0
        self.look_at_s = 0.0
        self.busy_until_s = 0.0
        self.wheel = LedgerThread(self.road, self.id, NoMailbox())  # type: ignore[arg-type]
        self.wheel._stopping = Pause(self.process)  # type: ignore[assignment]
        self.rung = True
        self.mail: list[Exit] = []
        self.declared_dead = False
        self.turning: Task | None = None
        self.beating: Task | None = None

    def _quicken(self, interval_s: float) -> None:
        if interval_s < self.interval_s:
            self.interval_s = interval_s
            if self.beating is not None:
                self.beating.wake()

    # Birth --------------------------------------------------------------------------------------

    def _main(self) -> None:
        while True:
            self._register()
            self.beating = self.process.spawn("heartbeat", self._beat_loop)
            self.turning = self.process.spawn("turns", self._turn_loop)
            if self.place.plan.reaps:
                world = self.world
                keep_watch(self.process, self.road, world.recovery, self.id, self._is_current(), world.watchmen)
            if self.scenario.schedule_every_s is not None:
                self.process.spawn("schedules", partial(keep_schedules, self.process, self.road, self._is_current()))
            task = self.process.hub.current
            assert task is not None
            self.on_end: Callable[[], None] = task.wake
            task.wait(None)
            if not self.declared_dead:
                return
            self.world.tell(f"{self.process.name} was declared dead as {self.id} and comes back")
            self._begin_anew()

    def _is_current(self) -> Callable[[], bool]:
        mine = self.id
        return lambda: self.id == mine and not self.declared_dead

    def _register(self) -> None:
        machine, scenario, recovery = self.place.machine, self.scenario, self.world.recovery
        birth = NewWorker(
            id=self.id,
            name=self.process.name,
            host=machine.name,
            pid=self.process.pid,
            boot_id=machine.boot_id,
            pid_namespace=host.pid_namespace(),
            process_started=self.process.started,
            queues=(QUEUE,),
            tasks=(TaskRecord(TASK, QUEUE),),
            concurrency=self.place.plan.slots,
            version="0",
            heartbeat_interval_s=scenario.interval_s,
            suspect_after_s=recovery.claimed_stale_after_s,
            running_stale_after_s=recovery.running_stale_after_s,
            status_page=self.id,
            rules=recovery.rules,
        )
        self.world.expect(self, birth)
        while True:
            sent_s = host.boottime_s()
            try:
                self.road.workers.register(birth)
            except LedgerUnavailable:
                self._pause(LONGEST_PAUSE_S)
            else:
                self.confirmed_s = sent_s
                self.road.worker_id = self.id
                return

    def _pause(self, pause_s: float) -> None:
        task = self.process.hub.current
        assert task is not None
        task.sleep(pause_s)

    # Heartbeats ---------------------------------------------------------------------------------

    def _beat_loop(self) -> None:
        current, task = self._is_current(), self.process.hub.current
        assert task is not None
        next_s, pause_s = host.boottime_s() + self.interval_s, 0.0
        while current():
            woken = task.wait(max(0.0, next_s - host.boottime_s()))
            if woken == "lost":
                pause_s, next_s = FIRST_PAUSE_S, host.boottime_s() + FIRST_PAUSE_S
            elif woken:
                next_s = min(next_s, host.boottime_s() + self.interval_s)
            if not current():
                return
            if host.boottime_s() < next_s - 1e-9:
                continue
            sent_s = host.boottime_s()
            try:
                answer = self.road.workers.beat(Heartbeat(self.id, len(self.given), self.processed))
            except LedgerError:
                pause_s = min(max(FIRST_PAUSE_S, pause_s * 2), LONGEST_PAUSE_S)
                self._pause(pause_s)
                next_s = host.boottime_s()
                continue
            pause_s, next_s = 0.0, sent_s + self.interval_s
            if current():
                self._after_beat(sent_s, answer)

    def _reconnect(self) -> None:
        """Beat soon: the connection was lost, and its loss must not be taken for ours."""
        if self.beating is not None:
            self.beating.wake("lost")

    def _after_beat(self, sent_s: float, answer: HeartbeatAnswer) -> None:
        if answer.state in (WorkerState.DEAD, WorkerState.STOPPED):
            self._die()
            return
        self.confirmed_s = sent_s
        self.beats += 1
        if answer.was_suspect or self.beats % BEATS_PER_COMPARISON == 0:
            self.compare_wanted = True
        for _, token in answer.cancel:
            if token in self.given:
                self.given[token].stop(Cancelled("cancelled by request while it ran"))
        self._wake()

    def _die(self) -> None:
        """Drop everything: the ledger gave our jobs away."""
        if not self.declared_dead:
            self.declared_dead = True
            self._kill_all(None)
            self._wake()
            if self.beating is not None:
                self.beating.wake()
            self.on_end()

    def _kill_all(self, fate: Outcome | None) -> None:
        for runner in list(self.given.values()):
            if fate is None:
                self.given.pop(runner.token)
                runner.kill()
            else:
                runner.stop(fate)

    # Turns --------------------------------------------------------------------------------------

    def ring(self) -> None:
        """Hear that there may be work."""
        self.rung = True
        self._wake()

    def post(self, exit: Exit) -> None:
        """Hear that a runner ended."""
        self.mail.append(exit)
        self._wake()

    def _wake(self) -> None:
        if self.turning is not None:
            self.turning.wake()

    def _turn_loop(self) -> None:
        current, task = self._is_current(), self.process.hub.current
        assert task is not None
        while current():
            self._take_mail()
            self._tick(host.boottime_s())
            if self.draining and self._is_empty():
                self._retire()
                return
            if self.uncertain is not None or self.compare_wanted:
                self._compare()
                continue
            turn = self._next_turn()
            if turn is None:
                task.wait(self._patience_s())
                continue
            message = self.wheel._turn(turn)
            if not current():
                return
            if isinstance(message, TurnUncertain):
                self.uncertain = turn
            else:
                self._after_turn(message)

    def _patience_s(self) -> float:
        now_s = host.boottime_s()
        waits = [self.scenario.poll_s if self.draining else max(0.0, self.look_at_s - now_s)]
        waits += [max(0.0, held_job.queued_s + MAX_WAIT_IN_HAND_S - now_s) for held_job in (*self.hand, *self.ready)]
        waits += [max(0.0, runner.deadline_s - now_s) for runner in self.given.values() if not runner.stopped]
        again_s = self.busy_until_s if now_s < self.busy_until_s else self.outbox.next_s()
        if again_s is not None:
            waits = [*waits[1:], max(0.0, again_s - now_s)] if now_s < self.busy_until_s else [*waits, again_s - now_s]
        if self.draining:
            waits.append(max(0.05, self.drain_until_s - now_s))
        return max(min(waits), LEAST_NAP_S)

    def _next_turn(self) -> Turn | None:
        now_s = host.boottime_s()
        if now_s < self.busy_until_s:
            return None
        self.outbox.take_up(now_s)
        free = self.place.plan.slots - len(self.given) - len(self.starting) - len(self.ready)
        start: list[AttemptRef] = []
        while self.hand and len(start) < free:
            held_job = self.hand.pop(0)
            self.starting[held_job.token] = held_job
            start.append(AttemptRef(held_job.job.job_id, held_job.token))
        chosen = len(start)
        start += self.forgotten
        self.forgotten = []
        wish = self._wish(now_s, free - chosen, busy=bool(start or len(self.outbox)))
        if wish is not None:
            self.rung = False
        if wish is not None or now_s >= self.look_at_s:
            self.look_at_s = now_s + self.scenario.poll_s
        if not start and wish is None and not len(self.outbox):
            return None
        return self.outbox.turn(self.id, tuple(start), wish)

    def _wish(self, now_s: float, free: int, *, busy: bool) -> ClaimRequest | None:
        if self.draining or not (busy or self.rung or now_s >= self.look_at_s):
            return None
        if now_s - self.confirmed_s > self.world.recovery.claimed_stale_after_s / 2:
            return None
        room = free - len(self.hand) + AHEAD
        return ClaimRequest((QUEUE,), (TASK,), room, start=max(0, free - len(self.hand))) if room > 0 else None

    def _after_turn(self, message: TurnDone) -> None:
        turn, answer = message.turn, message.answer
        if not answer.alive:
            self._die()
            return
        self.outbox.written(turn)
        if message.deferred is not None:
            self._defer(message.deferred, host.boottime_s())
        for _, token in answer.superseded:
            self.starting.pop(token, None)
            self._stop_superseded(token)
        begun = [self.starting.pop(held.token, None) for held in turn.start]
        self.ready += [held_job for held_job in begun if held_job is not None]
        self.compare_wanted |= any(held.token in self.entered for held in turn.start)
        now_s = host.boottime_s()
        for job in answer.claimed:
            held_job = self.terms.hold(job, now_s)
            (self.ready if job.running else self.hand).append(held_job)
        if turn.claim_request is not None and len(answer.claimed) >= turn.claim_request.limit:
            self.rung = True
        self._feed()

    def _defer(self, turn: Turn, now_s: float) -> None:
        self.outbox.defer(turn, now_s)
        held = [self.starting.pop(held.token, None) for held in turn.start]
        self.hand += [held_job for held_job in held if held_job is not None]
        if turn.claim_request is not None or turn.start:
            self.rung = True
            self.busy_until_s = now_s + LOCKED_PAUSE_S

    def _stop_superseded(self, token: int) -> None:
        runner = self.given.pop(token, None)
        if runner is not None:
            runner.kill()

    def _compare(self) -> None:
        self.compare_wanted = False
        current = self._is_current()
        held = self.wheel._compare().held
        if current():
            self._after_comparison(held)

    def _after_comparison(self, held: list[HeldRecord]) -> None:
        theirs = {item.token: item for item in held}
        turn, self.uncertain = self.uncertain, None
        if turn is not None:
            self.outbox.put_back(turn, set(theirs))
            self._resolve_started(turn, theirs)
            self.rung = True
        # What ended while we asked is still in the mail, and ours.
        ours = self.outbox.tokens() | set(self.given) | {held_job.token for held_job in (*self.hand, *self.ready)}
        for token, item in theirs.items():
            if item.state is JobState.CLAIMED and token in self.entered:
                self.forgotten.append(AttemptRef(item.job_id, token))
            elif token not in ours:
                self._part_with(item)
        unbegun = [held_job for held_job in self.ready if held_job.token in theirs]
        again = [held_job for held_job in unbegun if theirs[held_job.token].state is JobState.CLAIMED]
        self.hand = [*again, *(held_job for held_job in self.hand if held_job.token in theirs)]
        self.ready = [held_job for held_job in unbegun if held_job not in again]
        for token in [token for token in self.given if token not in theirs]:
            self._stop_superseded(token)
        self._feed()

    def _part_with(self, item: HeldRecord) -> None:
        if item.token not in self.entered:
            self.outbox.give_back(item.job_id, item.token, item.queue)
            return
        self.outbox.endings.append(conclude(attempt_of(item), Died("the ledger forgot its end", counts=False)))

    def _resolve_started(self, turn: Turn, theirs: dict[int, HeldRecord]) -> None:
        for held in turn.start:
            held_job, there = self.starting.pop(held.token, None), theirs.get(held.token)
            if held_job is None or there is None:
                continue
            if there.state is JobState.RUNNING:
                self.ready.append(held_job)
            else:
                self.hand.insert(0, held_job)

    # Runners ------------------------------------------------------------------------------------

    def _feed(self) -> None:
        now_s = host.boottime_s()
        waiting = []
        for held_job in self.ready:
            if len(self.given) < self.place.plan.slots and may_begin(held_job, self.confirmed_s, now_s):
                held_job.sent_s = now_s
                self.entered.add(held_job.token)
                self.given[held_job.token] = Runner(self, held_job)
                self.leases.wake()
            else:
                waiting.append(held_job)
        self.ready = waiting

    def _take_mail(self) -> None:
        mail, self.mail = self.mail, []
        for exit in mail:
            runner = self.given.pop(exit.token, None)
            if runner is None:
                continue
            self.processed += 1
            job = runner.hold.job
            if isinstance(exit.outcome, Succeeded):
                self.outbox.done.append(Success(job.job_id, job.token, exit.outcome.result))
            else:
                self.outbox.endings.append(conclude(runner.hold.attempt(), exit.outcome))

    def _tick(self, now_s: float) -> None:
        for runner in list(self.given.values()):
            if now_s >= runner.deadline_s and not runner.stopped:
                runner.stop(Overran("ran past its deadline"))
        self._feed()
        patience_s = 0.0 if self.draining else MAX_WAIT_IN_HAND_S
        for waiting in (self.ready, self.hand):
            while waiting and now_s - waiting[0].queued_s >= patience_s:
                held_job = waiting.pop(0)
                self.outbox.give_back(held_job.job.job_id, held_job.token, held_job.job.queue)
        if self.draining and now_s >= self.drain_until_s:
            self._kill_all(Died("drain", counts=False, drained=True))

    def _watch_leases(self) -> None:
        """Kill runners whose lease ended: what the fork server does, even beside a frozen worker."""
        task = self.fork_server.hub.current
        assert task is not None
        while True:
            now_s, next_s = host.boottime_s(), math.inf
            for runner in list(self.given.values()):
                stop_s = must_stop_at_s(runner.hold, self.confirmed_s)
                if stop_s is None or runner.stopped:
                    continue
                if now_s >= stop_s:
                    runner.stop(Died("lease ended", counts=False))
                else:
                    next_s = min(next_s, stop_s)
            task.wait(None if next_s == math.inf else max(next_s - now_s, LEAST_NAP_S))

    # Ends ---------------------------------------------------------------------------------------

    def drain(self, grace_s: float) -> None:
        """Shut down in order."""
        with stand_on(self.place.machine):
            self.drain_until_s = host.boottime_s() + grace_s
        self.draining = True
        self._wake()

    def _is_empty(self) -> bool:
        busy = self.given or self.hand or self.ready or self.starting or self.mail
        return not busy and self.outbox.is_empty and self.uncertain is None

    def _retire(self) -> None:
        try:
            self.road.workers.stop(self.id)
        except LedgerError:
            pass
        self.world.tell(f"{self.id} shut down in order")
        self.process.hub.after(0.0, self.crash)

    def crash(self) -> None:
        if self.process.alive:
            self.process.kill()
            self.road.disconnect()
            # The kernel signals the fork server, which ends with all that it forked.
            self.process.hub.after(0.01, self.end_family)

    def end_family(self) -> None:
        self.fork_server.kill()
        for runner in list(self.given.values()):
            runner.kill()
        self.given.clear()


def keep_watch(
    process: Process,
    road: NetworkLink,
    recovery: Recovery,
    by: str,
    current: Callable[[], bool],
    watchmen: dict[str, Loop],
) -> None:
    """Let a process walk the rounds of the product's reaper, with these settings."""

    def walk() -> None:
        reaper_loop = Loop(Reaper(road, recovery, by=by))  # type: ignore[arg-type]
        task = process.hub.current
        assert task is not None
        watchmen[process.name] = reaper_loop
        reaper_loop._tick_s = host.boottime_s()
        while current():
            task.wait(max(reaper_loop.step(), LEAST_NAP_S))

    process.spawn("reaper", walk)


def keep_schedules(process: Process, road: NetworkLink, current: Callable[[], bool]) -> None:
    """Let a process keep the clock of schedules, by the product's own rules."""
    keeper = Scheduler(road, frozenset())  # type: ignore[arg-type]
    task = process.hub.current
    assert task is not None
    while current():
        try:
            wait_s = keeper.step()
        except LedgerError:
            wait_s = SCHEDULE_PAUSE_S * 10
        task.wait(max(wait_s, 0.01))


def see_neighbour_die(world: "World", process: Process, road: NetworkLink, worker_id: str) -> None:
    """Bury a worker of the same machine whose process is gone: what the ring of pidfds does."""
    reaper = Reaper(road, world.recovery, by=process.name)  # type: ignore[arg-type]
    task = process.hub.current
    assert task is not None
    pause_s = 0.1
    while True:
        try:
            reaper.report_death(worker_id, Detector.PEER, "its process no longer exists")
            return
        except LedgerUnavailable:
            task.sleep(pause_s)
            pause_s = min(pause_s * 2, 2.0)
