"""What becomes of each job of a runner that died or was ended, its autopsy, and who is to blame on a shared loop."""

import math
import selectors
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from unstuck import host
from unstuck.domain.autopsy import MAX_BESIDE, Autopsy, DeathKind, last_lines
from unstuck.domain.endings import Cancelled, Died, Outcome, Overran, Raised, Stalled, Succeeded, conclude
from unstuck.domain.liveness import Detector
from unstuck.domain.units import brief
from unstuck.errors import ErrorCode
from unstuck.ledger.contract.workers import Claimed, FollowUp, Output, Success
from unstuck.logs import logger
from unstuck.metrics.counters import Counters
from unstuck.runner.cgroups import MemoryLimits
from unstuck.runner.fork_server import LEASE_ENDED
from unstuck.runner.journal import checkpoint_entry
from unstuck.runner.processes import OVER_PROCESS_LIMIT
from unstuck.runner.status_page import StatusPage
from unstuck.worker.exit_status import signal_name
from unstuck.worker.fork_client import ForkServerClient, ForkServerDied, RunnerBorn, RunnerExit
from unstuck.worker.held_jobs import Begun, HeldJob, Stop
from unstuck.worker.job_metrics import JobMetrics
from unstuck.worker.journal import JournalWriter, written
from unstuck.worker.limits import OwnPauses
from unstuck.worker.outbox import Outbox
from unstuck.worker.outcome_log import OutcomeLog
from unstuck.worker.pacing import Pace
from unstuck.worker.runner_process import Finished
from unstuck.worker.slots import Slot, SlotTable

Explained = Died | Overran | Stalled | Cancelled


def of_death(crew: Slot, exit: RunnerExit, now_s: float) -> Autopsy:
    """Explain the end of a runner: what is the same for every job that was in it."""
    kind = DeathKind.UNKNOWN
    if exit.oom:
        kind = DeathKind.OUT_OF_MEMORY
    elif exit.cause.endswith(OVER_PROCESS_LIMIT):
        kind = DeathKind.PROCESS_LIMIT
    elif exit.signal is not None:
        kind = DeathKind.SIGNAL
    elif exit.exit_code is not None:
        kind = DeathKind.EXIT
    stdout, stderr = crew.runner.last_output()
    return Autopsy(
        kind=kind,
        summary=exit.cause,
        detector=Detector.RUNNER,
        seen_after_s=round(max(0.0, now_s - crew.gone_s), 4) if crew.gone_s is not None else None,
        signal=None if exit.signal is None else signal_name(exit.signal),
        exit_code=exit.exit_code,
        pid=exit.pid or crew.runner.pid,
        sure=exit.oom_sure or not exit.oom,
        doubt="" if exit.oom_sure else exit.oom_words,
        memory_bytes=crew.memory_bytes or None,
        max_memory_bytes=max(exit.max_rss_bytes, crew.memory_bytes) or None,
        cpu_s=round(exit.cpu_s, 3) if exit.pid else None,
        stack=crew.runner.stacks.text(),
        stdout=_tail(stdout),
        stderr=_tail(stderr),
    )


def of_stop(crew: Slot, item: Finished) -> Autopsy:
    """Explain why a job was ended while its runner lived on: it obeyed."""
    return Autopsy(
        kind=DeathKind.UNKNOWN,
        summary="",
        detector=Detector.RUNNER,
        pid=crew.runner.pid,
        memory_bytes=crew.memory_bytes or None,
        max_memory_bytes=crew.memory_bytes or None,
        stack=item.stack or crew.runner.stacks.text(),
        stdout=_tail(item.stdout),
        stderr=_tail(item.stderr),
    )


def explain(outcome: Outcome, base: Autopsy, hold: HeldJob, ran_s: float, company: Sequence[int] = ()) -> Outcome:
    """Give the outcome with the autopsy of this very job; `company` are the jobs that were in the same process."""
    if not isinstance(outcome, Explained):
        return outcome
    stop = hold.stop
    changes: dict[str, Any] = {"progress": hold.progress, "ran_s": round(max(0.0, ran_s), 3)}
    if stop is not None:
        # We ended it: that a signal did it in the end is no news, and what led to it is.
        changes |= {"kind": stop.kind, "summary": outcome.cause, "signals": tuple(stop.tried), "seen_after_s": None}
    others = [job_id for job_id in company if job_id != hold.job.job_id]
    changes |= {"beside": tuple(others[:MAX_BESIDE]), "beside_count": len(others)}
    return msgspec.structs.replace(outcome, autopsy=msgspec.structs.replace(base, **changes))


def _tail(data: bytes) -> str:
    return last_lines(data.decode("utf-8", "backslashreplace"))


def assign_blame(crew: Slot, stubborn: HeldJob, pulse_s: float, silent_s: float, now_s: float) -> None:
    """Seal the fate of everybody in a runner that is about to be killed, since `stubborn` could not be stopped.

    Whoever keeps the loop from turning did it. Where no Python code ran at all, nobody can say who it was, and all
    that were not stopped before are suspects. Otherwise it is the one that would not stop."""
    blocker = crew.blocker if crew.blocker is not None and crew.blocker.is_news(now_s) else None
    culprit = crew.jobs.get(blocker.token) if blocker is not None else None
    if blocker is not None and culprit is not None and culprit is not stubborn:
        blocked = f"kept the event loop of its runner from turning for {brief(now_s - blocker.since_s)}"
        if culprit.stop is None:
            died = Died(f"{blocked}, so that job {stubborn.job.job_id} could not be stopped")
            culprit.stop = Stop(died, DeathKind.BLOCKED_LOOP)
        why = f"its runner was ended because job {culprit.job.job_id} {blocked}"
        _excuse(crew, f"job {culprit.job.job_id} {blocked}")
        fate = Died(why, counts=False)
    elif culprit is None and len(crew.jobs) > 1 and now_s - pulse_s > silent_s:
        why = (
            f"its runner was ended because job {stubborn.job.job_id} could not be stopped: no Python code ran there "
            f"for {brief(now_s - pulse_s)}, in whichever job"
        )
        fate = Died(why, shared="process")
    else:
        fate = Died(f"its runner was ended because job {stubborn.job.job_id} would not stop", counts=False)
    for hold in crew.jobs.values():
        if hold.stop is None:
            hold.stop = Stop(fate, DeathKind.SHARED)
        hold.stop.kill_at_s = 0.0


def _excuse(crew: Slot, why: str) -> None:
    """Tell with the end of each job that ran out of time meanwhile whose doing that was."""
    for hold in crew.jobs.values():
        stop = hold.stop
        if stop is not None and isinstance(stop.fate, Overran | Stalled):
            stop.fate = msgspec.structs.replace(stop.fate, cause=f"{stop.fate.cause}; {why}")


class HandedJobs:
    """What feeding, watching and burying share. Used in the floor's thread alone."""

    def __init__(self, roster: SlotTable, outbox: Outbox, pace: Pace, scribes: JournalWriter) -> None:
        self.roster = roster
        self.ready: deque[HeldJob] = deque()
        """RUNNING in the ledger, and not yet with a runner."""
        self.given: dict[int, Slot] = {}
        self.begun = Begun()
        self.processed = 0
        self.ended_since_turn = 0
        self.counts = JobMetrics(Counters())
        self.outcome_log = OutcomeLog()
        self.scribes = scribes
        self._outbox = outbox
        self._pace = pace

    def job_ids(self) -> list[int]:
        """Return the jobs that runners have."""
        return [hold.job.job_id for token, crew in self.given.items() if (hold := crew.jobs.get(token)) is not None]

    def _take_reports(self, crew: Slot) -> None:
        if finished := crew.runner.read():
            # Between the two: whatever a job wrote down was sent before its report.
            self.scribes.take(crew)
            self._take_ended(crew, finished)

    def _take_ended(self, crew: Slot, finished: list[Finished]) -> None:
        if not finished:
            return
        now_s = host.boottime_s()
        began_s = crew.since_s
        self.roster.saw_life()
        if not crew.is_async:
            self._pace.saw_sync_jobs(len(finished), now_s - crew.since_s)
            crew.since_s = now_s
        # Those of a sync runner ended one after another, between two looks.
        each_s = (now_s - began_s) / len(finished)
        for number, item in enumerate(finished):
            hold = self.roster.remove_job(crew, item.token)
            if hold is None or self.given.pop(item.token, None) is None:
                continue  # Superseded meanwhile: nobody wants its outcome any more.
            if crew.is_async:
                self.counts.ran(hold, hold.sent_s, now_s - hold.sent_s)
            else:
                self.counts.ran(hold, began_s + number * each_s, each_s)
            self._conclude(crew, hold, item, now_s - (hold.sent_s if crew.is_async else began_s))
        crew.ended += len(finished)

    def _conclude(self, crew: Slot, hold: HeldJob, item: Finished, ran_s: float) -> None:
        job, outcome = hold.job, item.outcome
        if item.checkpoint:
            self._outbox.put_entry(written(hold, checkpoint_entry(item.checkpoint)))
        if item.entry is not None:
            self._outbox.put_entry(written(hold, item.entry))
        if item.follow:
            self._outbox.follow[job.token] = [FollowUp(job.job_id, job.token, one) for one in item.follow]
        if isinstance(outcome, Succeeded):
            self._outbox.done.append(Success(job.job_id, job.token, outcome.result))
        else:
            ending = conclude(hold.attempt(), self._meaning(crew, hold, item, ran_s))
            self._outbox.endings.append(ending)
            self.outcome_log.ended(job, ending, host.boottime_s())
        if hold.stop is not None and crew.shared and all(other.stop is None for other in crew.jobs.values()):
            crew.runner.stacks.forget()
        if item.stdout or item.stderr:
            self._outbox.put_output(Output(job.job_id, job.token, item.stdout, item.stderr))
        self._count_one()

    def _meaning(self, crew: Slot, hold: HeldJob, item: Finished, ran_s: float) -> Outcome:
        """Say what an end without success means: what a job raises when we stop it is our doing."""
        if hold.stop is not None and isinstance(item.outcome, Cancelled | Raised):
            return explain(hold.stop.fate, of_stop(crew, item), hold, ran_s)
        if isinstance(item.outcome, Cancelled):
            return Raised("CancelledError", "The task cancelled itself", "")
        return item.outcome

    def _came_back(self, crew: Slot, token: int, now_s: float) -> None:
        hold = self.roster.remove_job(crew, token)
        self.begun.discard(token)
        if hold is None or self.given.pop(token, None) is None:
            return
        back: list[HeldJob] = []
        self._not_begun(hold, back, now_s)
        self.ready.extend(back)

    def _not_begun(self, hold: HeldJob, back: list[HeldJob], now_s: float) -> None:
        """Settle or keep a job that no runner entered: a drain, a deadline or a lease ends only what has begun."""
        if hold.stop is not None and isinstance(hold.stop.fate, Cancelled):
            self.counts.never_began(hold)
            self._outbox.endings.append(conclude(hold.attempt(), hold.stop.fate))
            return
        hold.stop = None
        hold.queued_s = now_s
        back.append(hold)

    def _count_one(self) -> None:
        """Count an attempt whose code came to an end by itself."""
        self.processed += 1
        self.ended_since_turn += 1


WAIT_FOR_STATUS_S = 2.0
"""How long to wait for a dead runner's exit status once its death is certain. The nursery tells it within milliseconds,
unless it is frozen, or has a crowd to kill first."""
BIRTH_S = 10.0
"""How long a job waits for its runner to be born; the nursery needs milliseconds, unless it is frozen."""

log = logger("unstuck.worker")


class RunnerDeaths(HandedJobs):
    def __init__(
        self,
        bench: ForkServerClient,
        trace: StatusPage,
        worker_id: str,
        slots: int,
        selector: selectors.BaseSelector,
        outbox: Outbox,
        pace: Pace,
    ) -> None:
        super().__init__(SlotTable(bench, slots, trace), outbox, pace, JournalWriter(selector, outbox))
        self._bench = bench
        self._trace = trace
        self._worker_id = worker_id
        self._selector = selector
        self._nursery_gone = False
        self._in_company = False
        """The nursery died, and several jobs with it."""
        self._memory = MemoryLimits()
        self._pauses = OwnPauses(host.boottime_s())
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
                case ForkServerDied():
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

    def _saw_gone(self, crew: Slot) -> None:
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

    def _bury_if_late(self, crew: Slot, now_s: float) -> None:
        """Settle without its exit status what a runner held of whom nobody told how it ended."""
        if crew.gone_s is not None and now_s - self._pauses.excuse(crew.gone_s) > WAIT_FOR_STATUS_S:
            cause = "its process is gone; the exit status is unknown"
            if crew.runner.lives():
                cause = (
                    "its process let go of the worker and lived on, so it was killed: user code closed descriptors "
                    "that it had not opened, or put another program in its place (exec)"
                )
            self._bury(crew, RunnerExit(crew.slot, 0, cause))

    def _bury(self, crew: Slot, exit: RunnerExit) -> None:
        """Settle what a dead runner held: what it finished, what it never entered, and what it died in."""
        self._saw_gone(crew)
        self._take_signs(crew)
        self._take_reports(crew)
        self.scribes.take(crew)
        now_s = host.boottime_s()
        unsent = {hold.token for hold in crew.to_send}
        crew.to_send.clear()
        never_entered = unsent if crew.is_async else unsent | set(crew.runner.take_back())
        if self._trace.last_pulse_s(crew.slot) < crew.opened_s:
            # Its first pulse comes before its first job: it died at birth, or importing the app.
            never_entered = set(crew.jobs)
        back: list[HeldJob] = []
        stillborn = crew.ended == 0 and bool(never_entered) and never_entered >= set(crew.jobs)
        begun = [hold for hold in crew.jobs.values() if hold.token not in never_entered]
        death = of_death(crew, exit, now_s) if begun else None
        if death is not None:
            ended_by_us = next((hold.stop.kind for hold in begun if hold.stop is not None), None)
            self.counts.runner_died(death, ended_by_us)
        for token in list(crew.jobs):
            hold = self.roster.remove_job(crew, token)
            if token in never_entered or death is None:
                self.begun.discard(token)
            if hold is None or self.given.pop(token, None) is None:
                continue
            if token in never_entered or death is None:
                self._not_begun(hold, back, now_s)
            else:
                self._died_in(crew, hold, exit, death, begun, now_s)
        self.ready.extendleft(reversed(back))
        self.roster.remove(crew)
        self._memory.forget(crew.room)
        crew.runner.close()
        if stillborn:
            rest_s = self.roster.start_failed(now_s)
            log.error("A runner died before it began anything", cause=exit.cause, next_in_s=rest_s)

    def _died_in(
        self, crew: Slot, hold: HeldJob, exit: RunnerExit, death: Autopsy, begun: list[HeldJob], now_s: float
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
        began_s = hold.sent_s if crew.is_async else crew.since_s
        ran_s = now_s - began_s
        self.counts.ran(hold, began_s, ran_s)
        company = [other.job.job_id for other in begun]
        outcome = explain(hold.stop.fate if hold.stop else died, death, hold, ran_s, company)
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

    def _beside_since_s(self, dead: Slot) -> float | None:
        """Return when the oldest of the jobs began that other runners still run; None if there is none."""
        begun = [
            min(hold.sent_s for hold in crew.jobs.values()) if crew.is_async else crew.since_s
            for crew in self.roster.crews.values()
            if crew is not dead and crew.jobs and crew.gone_s is None
        ]
        return min(begun, default=None)

    def _lost_together(self) -> Literal["worker"] | None:
        return "worker" if self._in_company else None

    def _take_signs(self, crew: Slot) -> None:
        raise NotImplementedError

    def _limit_memory(self, crew: Slot) -> None:
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
        self._bench.configure(self._trace, self._worker_id)
        self._selector.register(self._bench, selectors.EVENT_READ, self._read_bench)
        self.roster.rest_until_s = 0.0
        self._nursery_gone = False

    def _miss_birth(self, crew: Slot, now_s: float) -> None:
        """The nursery does not answer: replace it, unless that would kill what others run; then wait without jobs."""
        if all(other.runner.pid is None for other in self.roster.crews.values() if other.jobs):
            log.error("The nursery does not answer and is killed")
            self._bench.kill_nursery()
            return
        tokens = crew.runner.take_back()
        for token in tokens:
            self._came_back(crew, token, now_s)
        if tokens:
            log.error("The nursery does not answer; giving back what waits for a runner", jobs=len(tokens))
            self.roster.rest_until_s = now_s + BIRTH_S
