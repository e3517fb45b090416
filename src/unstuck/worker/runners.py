"""Feed the runners, gather what they finish, and settle what they die in.

What ended goes into the outbox; what never began comes back to `ready`. All of it happens in the floor's
thread, between two selects.
"""

import math
import selectors
from collections import deque
from collections.abc import Callable

from unstuck import host
from unstuck.config import Settings
from unstuck.domain.errors import ErrorCode
from unstuck.domain.outcomes import Cancelled, Died, Outcome, Overran, Raised, Succeeded
from unstuck.domain.recovery import conclude
from unstuck.logs import logger
from unstuck.runner.nursery import LEASE_ENDED
from unstuck.runner.trace import Trace
from unstuck.store.records import Claimed, Done, Output
from unstuck.worker.bench import Bench, Finished, NurseryGone, RunnerBorn, RunnerExit
from unstuck.worker.fencing import may_begin, must_stop_at_s
from unstuck.worker.holds import Hold
from unstuck.worker.outbox import Outbox
from unstuck.worker.pace import Pace
from unstuck.worker.roster import Crew, Roster

WAIT_FOR_STATUS_S = 0.25
"""How long to wait for a dead runner's exit status once its death is certain."""
CHECK_S = 0.02
"""How often every job is looked at: deadlines and leases are no business of each single message."""
STOP_GRACE_S = 5.0
"""How long an async job may take to obey its cancellation before its runner is killed."""
MEMORY_LOOK_S = 1.0
BIRTH_S = 10.0
"""How long a job waits for its runner to be born; the nursery needs milliseconds, unless it is frozen."""

log = logger("unstuck.worker")


class Runners:
    def __init__(
        self,
        bench: Bench,
        trace: Trace,
        worker_id: str,
        settings: Settings,
        slots: int,
        selector: selectors.BaseSelector,
        outbox: Outbox,
        pace: Pace,
    ) -> None:
        self._bench = bench
        self._trace = trace
        self._worker_id = worker_id
        self._settings = settings
        self._selector = selector
        self._outbox = outbox
        self._pace = pace
        self._confirmed_s = 0.0
        self._checked_s = 0.0
        self._nursery_gone = False
        self.roster = Roster(bench, slots, trace)
        self.ready: deque[Hold] = deque()
        """RUNNING in the ledger, and not yet with a runner."""
        self.given: dict[int, Crew] = {}
        self.processed = 0
        self.ended_since_turn = 0
        self.on_death: Callable[[Claimed], None] = lambda job: None
        """Hears of every job whose runner died unasked: the health of this worker."""
        selector.register(bench, selectors.EVENT_READ, self._read_bench)

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
            waiting: deque[Hold] = deque()
            for hold in self.ready:
                crew = None
                if may_begin(hold, self._confirmed_s, now_s):
                    crew = self.roster.place(hold, now_s, depth, quick_since_s)
                if crew is None:
                    waiting.append(hold)
                else:
                    self.given[hold.token] = crew
            self.ready = waiting
        for crew in self.roster.opened:
            self._selector.register(crew.runner, selectors.EVENT_READ, self._reader(crew))
        self.roster.opened.clear()
        for crew in self.roster.loaded:
            if crew.gone_s is None:
                holds, crew.to_send = crew.to_send, []
                self.roster.tighten_lease(crew, holds, self._confirmed_s)
                crew.runner.send([hold.frame() for hold in holds])
                self._watch_writing(crew)
        self.roster.loaded.clear()

    def tick(self, now_s: float) -> None:
        if self._nursery_gone and not len(self._outbox):
            self._start_nursery()
        if now_s - self._checked_s < CHECK_S:
            return
        self._checked_s = now_s
        for crew in list(self.roster.crews.values()):
            if crew.gone_s is not None:
                if now_s - crew.gone_s > WAIT_FOR_STATUS_S:
                    self._bury(crew, "its process is gone; the exit status is unknown")
            elif crew.jobs:
                self.roster.renew_lease(crew, self._confirmed_s)
                self._check_crew(crew, now_s)

    def stop(self, token: int, fate: Outcome, now_s: float) -> None:
        """End a job that a runner has; what it becomes is written when it is really over."""
        crew = self.given.get(token)
        hold = None if crew is None else crew.jobs.get(token)
        if crew is not None and hold is not None and hold.fate is None:
            self._stop(crew, hold, fate, now_s)

    def _stop(self, crew: Crew, hold: Hold, fate: Outcome, now_s: float) -> None:
        hold.fate = fate
        if crew.is_async:
            crew.runner.cancel(hold.token)
            hold.stop_by_s = now_s + STOP_GRACE_S
            return
        for token in crew.runner.retract():
            self._came_back(crew, token, now_s)
        # From here on it can enter nothing more. Where this job's end is reported already, it is in the next one,
        # which is not to blame.
        self._take_ended(crew, crew.runner.read())
        if hold.token in crew.jobs:
            crew.runner.kill()

    def stop_superseded(self, token: int, now_s: float) -> None:
        """Somebody else has this job now: stop ours, and want nothing of it."""
        crew = self.given.pop(token, None)
        if crew is None:
            return
        hold = crew.jobs[token]
        log.warning("Stopping an attempt that was superseded", job_id=hold.job.job_id, token=token)
        if hold.fate is None:
            self._stop(crew, hold, Died("superseded", counts=False), now_s)

    def cancel(self, token: int) -> bool:
        """Cancel a job that a runner has; False where none has it."""
        crew = self.given.get(token)
        if crew is None:
            return False
        crew.jobs[token].cancel_requested = True
        self.stop(token, Cancelled("cancelled by request while it ran"), host.boottime_s())
        return True

    def retract_all(self) -> None:
        """Take back whatever no runner entered yet."""
        now_s = host.boottime_s()
        for crew in list(self.roster.crews.values()):
            if not crew.is_async and len(crew.jobs) > 1:
                for token in crew.runner.retract():
                    self._came_back(crew, token, now_s)

    def kill_all(self, fate: Outcome | None) -> None:
        """Kill every runner that is in a job; the jobs meet `fate` unless theirs is sealed already."""
        for crew in list(self.roster.crews.values()):
            for hold in crew.jobs.values():
                hold.fate = hold.fate or fate
            if crew.jobs or fate is None:
                crew.runner.kill()

    # Reading ----------------------------------------------------------------------------------

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
        self.roster.saw_life()
        if not crew.is_async:
            self._pace.saw_sync_jobs(len(finished), now_s - crew.since_s)
            crew.since_s = now_s
        for item in finished:
            hold = self.roster.take_off(crew, item.token)
            if hold is None or self.given.pop(item.token, None) is None:
                continue  # Superseded meanwhile: nobody wants its outcome any more.
            self._conclude(hold, item)
        crew.ended += len(finished)
        if not crew.jobs and not crew.is_async:
            self._recycle_if_due(crew, now_s)

    def _conclude(self, hold: Hold, item: Finished) -> None:
        job, outcome = hold.job, item.outcome
        if isinstance(outcome, Succeeded):
            self._outbox.done.append(Done(job.job_id, job.token, outcome.result))
        elif isinstance(outcome, Cancelled) or (isinstance(outcome, Raised) and hold.stop_by_s):
            # What it raises when we stop it is our doing. Without a fate of ours, it raised CancelledError by itself.
            fate = hold.fate or Raised("CancelledError", "The task cancelled itself", "")
            self._outbox.endings.append(conclude(hold.attempt(), fate))
        else:
            self._outbox.endings.append(conclude(hold.attempt(), outcome))
        if item.stdout or item.stderr:
            self._outbox.put_output(Output(job.job_id, job.token, item.stdout, item.stderr))
        self.processed += 1
        self.ended_since_turn += 1

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
                    crew = self.roster.crews.get(report.slot)
                    # By serial: a late report must not bury the next runner of the same slot.
                    if crew is not None and crew.runner.serial == report.serial:
                        self._bury(crew, report.cause, oom=report.oom)
                case NurseryGone():
                    self._replace_nursery(report.cause)

    def _watch_process(self, born: RunnerBorn) -> None:
        crew = self.roster.crews.get(born.slot)
        if crew is None or crew.runner.pid != born.pid or crew.pidfd is not None or crew.gone_s is not None:
            return
        crew.pidfd = crew.runner.pidfd()
        if crew.pidfd is not None:
            self._selector.register(crew.pidfd, selectors.EVENT_READ, lambda _events: self._saw_gone(crew))

    def _saw_gone(self, crew: Crew) -> None:
        """The kernel says that it is gone; how it died is told by the nursery in a moment."""
        if crew.gone_s is None:
            crew.gone_s = host.boottime_s()
            for watched in (crew.runner, crew.pidfd):
                if watched is not None:
                    try:
                        self._selector.unregister(watched)
                    except (KeyError, ValueError):
                        pass
            crew.pidfd = None

    def _bury(self, crew: Crew, cause: str, *, oom: bool = False) -> None:
        """Settle what a dead runner held: what it finished, what it never entered, and what it died in."""
        self._saw_gone(crew)
        self._take_ended(crew, crew.runner.read())
        now_s = host.boottime_s()
        unsent = {hold.token for hold in crew.to_send}
        crew.to_send.clear()
        never_entered = unsent if crew.is_async else unsent | set(crew.runner.retract())
        stdout, stderr = crew.runner.last_output()
        back: list[Hold] = []
        stillborn = crew.ended == 0 and bool(never_entered) and never_entered >= set(crew.jobs)
        for token in list(crew.jobs):
            hold = self.roster.take_off(crew, token)
            if hold is None or self.given.pop(token, None) is None:
                continue
            if token in never_entered:
                self._never_began(hold, back, now_s)
                continue
            code = ErrorCode.OUT_OF_MEMORY if oom else ErrorCode.WORKER_CRASHED
            # A lease that ran out is no crash, whoever ended it first: we or the nursery.
            self._died_in(hold, Died(cause, code, counts=not cause.endswith(LEASE_ENDED)))
            if not crew.is_async:
                self._outbox.put_output(Output(hold.job.job_id, token, stdout, stderr))
        self.ready.extendleft(reversed(back))
        self.roster.remove(crew)
        crew.runner.close()
        if stillborn:
            rest_s = self.roster.saw_stillborn(now_s)
            log.error("A runner died before it began anything", cause=cause, next_in_s=rest_s)

    def _died_in(self, hold: Hold, death: Died) -> None:
        if hold.fate is None:
            log.error("Worker died unexpectedly", job_id=hold.job.job_id, task=hold.job.task, cause=death.cause)
            if death.counts:
                self.on_death(hold.job)
        self._outbox.endings.append(conclude(hold.attempt(), hold.fate or death))
        self.processed += 1
        self.ended_since_turn += 1

    def _replace_nursery(self, cause: str) -> None:
        log.error("The nursery died; starting another", cause=cause)
        self._selector.unregister(self._bench)
        for crew in list(self.roster.crews.values()):
            crew.runner.kill()
            self._bury(crew, f"its nursery died ({cause})")
        self._bench.close()
        self.roster.rest_until_s = math.inf
        self._nursery_gone = True

    def _start_nursery(self) -> None:
        """Import the app anew. It may take its time, or fail: what the dead left behind was handed in before."""
        self._bench.start()
        self._bench.equip(self._trace, self._worker_id)
        self._selector.register(self._bench, selectors.EVENT_READ, self._read_bench)
        self.roster.rest_until_s = 0.0
        self._nursery_gone = False

    def _came_back(self, crew: Crew, token: int, now_s: float) -> None:
        hold = self.roster.take_off(crew, token)
        if hold is None or self.given.pop(token, None) is None:
            return
        back: list[Hold] = []
        self._never_began(hold, back, now_s)
        self.ready.extend(back)

    def _never_began(self, hold: Hold, back: list[Hold], now_s: float) -> None:
        """Settle or keep a job that no runner entered: a drain, a deadline or a lease ends only what has begun."""
        if isinstance(hold.fate, Cancelled):
            self._outbox.endings.append(conclude(hold.attempt(), hold.fate))
            return
        hold.fate = None
        hold.taken_s = now_s
        back.append(hold)

    # Time -------------------------------------------------------------------------------------

    def _check_crew(self, crew: Crew, now_s: float) -> None:
        crew.runner.trim_output()
        if crew.runner.pid is None and now_s - next(iter(crew.jobs.values())).given_s > BIRTH_S:
            self._miss_birth(crew, now_s)
            return
        if crew.is_async:
            holds = list(crew.jobs.values())
        else:
            if len(crew.jobs) > 1 and now_s - crew.since_s > self._pace.slow_s():
                # Whoever waits behind a long job can be served elsewhere.
                for token in crew.runner.retract():
                    self._came_back(crew, token, now_s)
            holds = list(crew.jobs.values())[:1]
        for hold in holds:
            self._check_hold(hold, hold.given_s if crew.is_async else crew.since_s, now_s)
            if hold.stop_by_s and now_s > hold.stop_by_s:
                self._kill_shared(crew, hold)
                return

    def _miss_birth(self, crew: Crew, now_s: float) -> None:
        """The nursery does not answer: replace it, unless that would kill what others run; then wait without jobs."""
        if all(other.runner.pid is None for other in self.roster.crews.values() if other.jobs):
            log.error("The nursery does not answer and is killed")
            self._bench.kill_nursery()
            return
        tokens = crew.runner.retract()
        for token in tokens:
            self._came_back(crew, token, now_s)
        if tokens:
            log.error("The nursery does not answer; giving back what waits for a runner", jobs=len(tokens))
            self.roster.rest_until_s = now_s + BIRTH_S

    def _check_hold(self, hold: Hold, began_s: float, now_s: float) -> None:
        limit_s = hold.policy.timeout_s
        if limit_s is not None and now_s - began_s > limit_s:
            self.stop(hold.token, Overran(f"ran longer than its timeout of {limit_s:g}s"), now_s)
        stop_at_s = must_stop_at_s(hold, self._confirmed_s)
        if stop_at_s is not None and now_s > stop_at_s and hold.fate is None:
            log.error("Stopping a job: no beat was confirmed before its lease ended", job_id=hold.job.job_id)
            self.stop(hold.token, Died("lease ran out: the ledger could not be reached", counts=False), now_s)

    def _kill_shared(self, crew: Crew, stubborn: Hold) -> None:
        """An async job would not stop: the loop that it shares must go, and the others are not to blame."""
        for hold in crew.jobs.values():
            why = f"its runner was ended because job {stubborn.job.job_id} would not stop"
            hold.fate = hold.fate or Died(why, counts=False)
            hold.stop_by_s = 0.0
        crew.runner.kill()

    def release_waiting(self, older_than_s: float, now_s: float) -> None:
        """Give back ready jobs that found no runner for so long: somebody else may be free."""
        while self.ready and now_s - self.ready[0].taken_s >= older_than_s:
            hold = self.ready.popleft()
            self._outbox.give_back(hold.job.job_id, hold.token, hold.job.queue)
