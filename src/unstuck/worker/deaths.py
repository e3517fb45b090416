"""See runners and their nursery die, and settle what they held: finished, never entered, or died in."""

import math
import selectors
from collections.abc import Callable
from typing import Literal

from unstuck import host
from unstuck.domain.autopsy import Autopsy
from unstuck.domain.errors import ErrorCode
from unstuck.domain.outcomes import Died
from unstuck.domain.recovery import conclude
from unstuck.logs import logger
from unstuck.runner.memory_limit import MemoryLimits
from unstuck.runner.nursery import LEASE_ENDED
from unstuck.runner.trace import Trace
from unstuck.store.records import Claimed, Output
from unstuck.worker import autopsies
from unstuck.worker.bench import Bench, NurseryGone, RunnerBorn, RunnerExit
from unstuck.worker.hands import Hands
from unstuck.worker.holds import Hold
from unstuck.worker.outbox import Outbox
from unstuck.worker.pace import Pace
from unstuck.worker.pauses import Pauses
from unstuck.worker.roster import Crew, Roster
from unstuck.worker.scribes import Scribes

WAIT_FOR_STATUS_S = 2.0
"""How long to wait for a dead runner's exit status once its death is certain. The nursery tells it within milliseconds,
unless it is frozen, or has a crowd to kill first."""
BIRTH_S = 10.0
"""How long a job waits for its runner to be born; the nursery needs milliseconds, unless it is frozen."""

log = logger("unstuck.worker")


class Deaths(Hands):
    def __init__(
        self,
        bench: Bench,
        trace: Trace,
        worker_id: str,
        slots: int,
        selector: selectors.BaseSelector,
        outbox: Outbox,
        pace: Pace,
    ) -> None:
        super().__init__(Roster(bench, slots, trace), outbox, pace, Scribes(selector, outbox))
        self._bench = bench
        self._trace = trace
        self._worker_id = worker_id
        self._selector = selector
        self._nursery_gone = False
        self._in_company = False
        """The nursery died, and several jobs with it."""
        self._memory = MemoryLimits()
        self._pauses = Pauses(host.boottime_s())
        self.on_death: Callable[[Claimed, float | None], tuple[int, int]] = lambda job, beside_since_s: (0, 0)
        """Hears of every job whose runner died unasked, and when the oldest of the others began. Returns how many
        different jobs died here since one ended otherwise, and how often this one did before."""
        selector.register(bench, selectors.EVENT_READ, self._read_bench)

    def _read_bench(self, _events: int) -> None:
        for report in self._bench.read():
            match report:
                case RunnerBorn():
                    self._watch_process(report)
                case RunnerExit():
                    crew = self.roster.crews.get(report.slot)
                    # By serial: a late report must not bury the next runner of the same slot.
                    if crew is not None and crew.runner.serial == report.serial:
                        self._bury(crew, report)
                case NurseryGone():
                    self._replace_nursery(report.cause)

    def _watch_process(self, born: RunnerBorn) -> None:
        crew = self.roster.crews.get(born.slot)
        if crew is None or crew.runner.pid != born.pid or crew.pidfd is not None or crew.gone_s is not None:
            return
        crew.room = born.room
        self._limit_memory(crew)
        crew.pidfd = crew.runner.pidfd()
        if crew.pidfd is not None:
            self._selector.register(crew.pidfd, selectors.EVENT_READ, lambda _events: self._saw_gone(crew))

    def _saw_gone(self, crew: Crew) -> None:
        """The kernel says that it is gone; how it died is told by the nursery in a moment."""
        if crew.gone_s is None:
            crew.gone_s = host.boottime_s()
            for watched in (crew.runner, crew.runner.signs, crew.runner.line.socket, crew.pidfd):
                if watched is not None:
                    try:
                        self._selector.unregister(watched)
                    except (KeyError, ValueError):
                        pass
            crew.pidfd = None

    def _bury_if_late(self, crew: Crew, now_s: float) -> None:
        """Settle without its exit status what a runner held of whom nobody told how it ended."""
        if crew.gone_s is not None and now_s - self._pauses.excuse(crew.gone_s) > WAIT_FOR_STATUS_S:
            cause = "its process is gone; the exit status is unknown"
            if crew.runner.lives():
                cause = (
                    "its process let go of the worker and lived on, so it was killed: user code closed descriptors "
                    "that it had not opened, or put another program in its place (exec)"
                )
            self._bury(crew, RunnerExit(crew.slot, 0, cause))

    def _bury(self, crew: Crew, exit: RunnerExit) -> None:
        """Settle what a dead runner held: what it finished, what it never entered, and what it died in."""
        self._saw_gone(crew)
        self._take_signs(crew)
        self._take_reports(crew)
        self.scribes.take(crew)
        now_s = host.boottime_s()
        unsent = {hold.token for hold in crew.to_send}
        crew.to_send.clear()
        never_entered = unsent if crew.is_async else unsent | set(crew.runner.retract())
        if self._trace.last_pulse_s(crew.slot) < crew.opened_s:
            # Its first pulse comes before its first job: it died at birth, or importing the app.
            never_entered = set(crew.jobs)
        back: list[Hold] = []
        stillborn = crew.ended == 0 and bool(never_entered) and never_entered >= set(crew.jobs)
        begun = [hold for hold in crew.jobs.values() if hold.token not in never_entered]
        death = autopsies.of_death(crew, exit, now_s) if begun else None
        if death is not None:
            ended_by_us = next((hold.stop.kind for hold in begun if hold.stop is not None), None)
            self.counts.runner_died(death, ended_by_us)
        for token in list(crew.jobs):
            hold = self.roster.take_off(crew, token)
            if token in never_entered or death is None:
                self.begun.discard(token)
            if hold is None or self.given.pop(token, None) is None:
                continue
            if token in never_entered or death is None:
                self._never_began(hold, back, now_s)
            else:
                self._died_in(crew, hold, exit, death, begun, now_s)
        self.ready.extendleft(reversed(back))
        self.roster.remove(crew)
        self._memory.forget(crew.room)
        crew.runner.close()
        if stillborn:
            rest_s = self.roster.saw_stillborn(now_s)
            log.error("A runner died before it began anything", cause=exit.cause, next_in_s=rest_s)

    def _died_in(
        self, crew: Crew, hold: Hold, exit: RunnerExit, death: Autopsy, begun: list[Hold], now_s: float
    ) -> None:
        job = hold.job
        code = ErrorCode.OUT_OF_MEMORY if exit.oom else ErrorCode.WORKER_CRASHED
        # A lease that ran out is no crash, whoever ended it first: we or the nursery.
        counts = not exit.cause.endswith(LEASE_ENDED)
        # Those whose end we decided ourselves are not among the suspects.
        shared = crew.is_async and sum(1 for other in begun if other.stop is None) > 1
        unasked = hold.stop is None and counts
        in_a_row, died_here = self.on_death(job, self._beside_since_s(crew)) if unasked else (0, 0)
        lost = "process" if shared else self._lost_together()
        died = Died(exit.cause, code, counts=counts, shared=lost, in_a_row=in_a_row, died_here=died_here)
        began_s = hold.given_s if crew.is_async else crew.since_s
        ran_s = now_s - began_s
        self.counts.ran(hold, began_s, ran_s)
        company = [other.job.job_id for other in begun]
        outcome = autopsies.explain(hold.stop.fate if hold.stop else died, death, hold, ran_s, company)
        ending = conclude(hold.attempt(), outcome)
        self._outbox.endings.append(ending)
        if hold.stop is None:
            self.outcome_log.runner_died(job, ending, exit.cause, exit.pid or crew.runner.pid, now_s)
        else:
            self.outcome_log.ended(job, ending, now_s)
        if not crew.shared:
            stdout, stderr = crew.runner.last_output()
            self._outbox.put_output(Output(job.job_id, job.token, stdout, stderr))
        # Not counted as processed: nothing was done.
        self.ended_since_turn += 1

    def _beside_since_s(self, dead: Crew) -> float | None:
        """Return when the oldest of the jobs began that other runners still run; None if there is none."""
        begun = [
            min(hold.given_s for hold in crew.jobs.values()) if crew.is_async else crew.since_s
            for crew in self.roster.crews.values()
            if crew is not dead and crew.jobs and crew.gone_s is None
        ]
        return min(begun, default=None)

    def _lost_together(self) -> Literal["worker"] | None:
        return "worker" if self._in_company else None

    def _take_signs(self, crew: Crew) -> None:
        raise NotImplementedError

    def _limit_memory(self, crew: Crew) -> None:
        """Have the kernel bound the memory of the job that a runner is in, where it can; we look at it in any case."""
        if crew.room and not crew.is_async and crew.jobs:
            self._memory.set_memory_limit(crew.room, next(iter(crew.jobs.values())).policy.memory_limit_bytes)

    # The nursery ------------------------------------------------------------------------------

    def _replace_nursery(self, cause: str) -> None:
        log.error("The nursery died; starting another", cause=cause)
        self._selector.unregister(self._bench)
        crews = list(self.roster.crews.values())
        # Whoever ran then may have killed it, or nobody of them.
        self._in_company = sum(len(crew.jobs) for crew in crews) > 1
        for crew in crews:
            crew.runner.kill()
            self._bury(crew, RunnerExit(crew.slot, 0, f"its nursery died ({cause})"))
        self._in_company = False
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
