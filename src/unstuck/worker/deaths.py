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


def of_death(slot: Slot, exit: RunnerExit, now_s: float) -> Autopsy:
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
    stdout, stderr = slot.runner.last_output()
    return Autopsy(
        kind=kind,
        summary=exit.cause,
        detector=Detector.RUNNER,
        seen_after_s=round(max(0.0, now_s - slot.gone_s), 4) if slot.gone_s is not None else None,
        signal=None if exit.signal is None else signal_name(exit.signal),
        exit_code=exit.exit_code,
        pid=exit.pid or slot.runner.pid,
        sure=exit.oom_sure or not exit.oom,
        doubt="" if exit.oom_sure else exit.oom_words,
        memory_bytes=slot.memory_bytes or None,
        max_memory_bytes=max(exit.max_rss_bytes, slot.memory_bytes) or None,
        cpu_s=round(exit.cpu_s, 3) if exit.pid else None,
        stack=slot.runner.stacks.text(),
        stdout=_tail(stdout),
        stderr=_tail(stderr),
    )


def of_stop(slot: Slot, item: Finished) -> Autopsy:
    """Explain why a job was ended while its runner lived on: it obeyed."""
    return Autopsy(
        kind=DeathKind.UNKNOWN,
        summary="",
        detector=Detector.RUNNER,
        pid=slot.runner.pid,
        memory_bytes=slot.memory_bytes or None,
        max_memory_bytes=slot.memory_bytes or None,
        stack=item.stack or slot.runner.stacks.text(),
        stdout=_tail(item.stdout),
        stderr=_tail(item.stderr),
    )


def explain(outcome: Outcome, base: Autopsy, held_job: HeldJob, ran_s: float, company: Sequence[int] = ()) -> Outcome:
    """Give the outcome with the autopsy of this very job; `company` are the jobs that were in the same process."""
    if not isinstance(outcome, Explained):
        return outcome
    stop = held_job.stop
    changes: dict[str, Any] = {"progress": held_job.progress, "ran_s": round(max(0.0, ran_s), 3)}
    if stop is not None:
        # We ended it: that a signal did it in the end is no news, and what led to it is.
        changes |= {"kind": stop.kind, "summary": outcome.cause, "signals": tuple(stop.actions), "seen_after_s": None}
    others = [job_id for job_id in company if job_id != held_job.job.job_id]
    changes |= {"beside": tuple(others[:MAX_BESIDE]), "beside_count": len(others)}
    return msgspec.structs.replace(outcome, autopsy=msgspec.structs.replace(base, **changes))


def _tail(data: bytes) -> str:
    return last_lines(data.decode("utf-8", "backslashreplace"))


def assign_blame(slot: Slot, stubborn: HeldJob, pulse_s: float, silent_s: float, now_s: float) -> None:
    """Seal the fate of everybody in a runner that is about to be killed, since `stubborn` could not be stopped.

    Whoever keeps the loop from turning did it. Where no Python code ran at all, nobody can say who it was, and all
    that were not stopped before are suspects. Otherwise it is the one that would not stop."""
    blocker = slot.blocker if slot.blocker is not None and slot.blocker.is_news(now_s) else None
    culprit = slot.jobs.get(blocker.token) if blocker is not None else None
    if blocker is not None and culprit is not None and culprit is not stubborn:
        blocked = f"kept the event loop of its runner from turning for {brief(now_s - blocker.since_s)}"
        if culprit.stop is None:
            died = Died(f"{blocked}, so that job {stubborn.job.job_id} could not be stopped")
            culprit.stop = Stop(died, DeathKind.BLOCKED_LOOP)
        why = f"its runner was ended because job {culprit.job.job_id} {blocked}"
        _excuse(slot, f"job {culprit.job.job_id} {blocked}")
        fate = Died(why, counts=False)
    elif culprit is None and len(slot.jobs) > 1 and now_s - pulse_s > silent_s:
        why = (
            f"its runner was ended because job {stubborn.job.job_id} could not be stopped: no Python code ran there "
            f"for {brief(now_s - pulse_s)}, in whichever job"
        )
        fate = Died(why, shared="process")
    else:
        fate = Died(f"its runner was ended because job {stubborn.job.job_id} would not stop", counts=False)
    for held_job in slot.jobs.values():
        if held_job.stop is None:
            held_job.stop = Stop(fate, DeathKind.SHARED)
        held_job.stop.kill_at_s = 0.0


def _excuse(slot: Slot, why: str) -> None:
    """Tell with the end of each job that ran out of time meanwhile whose doing that was."""
    for held_job in slot.jobs.values():
        stop = held_job.stop
        if stop is not None and isinstance(stop.outcome, Overran | Stalled):
            stop.outcome = msgspec.structs.replace(stop.outcome, cause=f"{stop.outcome.cause}; {why}")


class HandedJobs:
    """What feeding, watching and burying share. Used in the floor's thread alone."""

    def __init__(self, slots: SlotTable, outbox: Outbox, pace: Pace, journal_writer: JournalWriter) -> None:
        self.slots = slots
        self.ready: deque[HeldJob] = deque()
        """RUNNING in the ledger, and not yet with a runner."""
        self.given: dict[int, Slot] = {}
        self.begun = Begun()
        self.processed = 0
        self.ended_since_turn = 0
        self.counts = JobMetrics(Counters())
        self.outcome_log = OutcomeLog()
        self.journal_writer = journal_writer
        self._outbox = outbox
        self._pace = pace

    def job_ids(self) -> list[int]:
        """Return the jobs that runners have."""
        return [
            held_job.job.job_id for token, slot in self.given.items() if (held_job := slot.jobs.get(token)) is not None
        ]

    def _take_reports(self, slot: Slot) -> None:
        if finished := slot.runner.read():
            # Between the two: whatever a job wrote down was sent before its report.
            self.journal_writer.take(slot)
            self._take_ended(slot, finished)

    def _take_ended(self, slot: Slot, finished: list[Finished]) -> None:
        if not finished:
            return
        now_s = host.boottime_s()
        began_s = slot.job_started_s
        self.slots.saw_life()
        if not slot.is_async:
            self._pace.saw_sync_jobs(len(finished), now_s - slot.job_started_s)
            slot.job_started_s = now_s
        # Those of a sync runner ended one after another, between two looks.
        each_s = (now_s - began_s) / len(finished)
        for number, item in enumerate(finished):
            held_job = self.slots.remove_job(slot, item.token)
            if held_job is None or self.given.pop(item.token, None) is None:
                continue  # Superseded meanwhile: nobody wants its outcome any more.
            if slot.is_async:
                self.counts.ran(held_job, held_job.sent_s, now_s - held_job.sent_s)
            else:
                self.counts.ran(held_job, began_s + number * each_s, each_s)
            self._conclude(slot, held_job, item, now_s - (held_job.sent_s if slot.is_async else began_s))
        slot.jobs_done += len(finished)

    def _conclude(self, slot: Slot, held_job: HeldJob, item: Finished, ran_s: float) -> None:
        job, outcome = held_job.job, item.outcome
        if item.checkpoint:
            self._outbox.put_entry(written(held_job, checkpoint_entry(item.checkpoint)))
        if item.entry is not None:
            self._outbox.put_entry(written(held_job, item.entry))
        if item.follow:
            self._outbox.follow[job.token] = [FollowUp(job.job_id, job.token, one) for one in item.follow]
        if isinstance(outcome, Succeeded):
            self._outbox.done.append(Success(job.job_id, job.token, outcome.result))
        else:
            ending = conclude(held_job.attempt(), self._meaning(slot, held_job, item, ran_s))
            self._outbox.endings.append(ending)
            self.outcome_log.ended(job, ending, host.boottime_s())
        if held_job.stop is not None and slot.shared and all(other.stop is None for other in slot.jobs.values()):
            slot.runner.stacks.forget()
        if item.stdout or item.stderr:
            self._outbox.put_output(Output(job.job_id, job.token, item.stdout, item.stderr))
        self._count_one()

    def _meaning(self, slot: Slot, held_job: HeldJob, item: Finished, ran_s: float) -> Outcome:
        """Say what an end without success means: what a job raises when we stop it is our doing."""
        if held_job.stop is not None and isinstance(item.outcome, Cancelled | Raised):
            return explain(held_job.stop.outcome, of_stop(slot, item), held_job, ran_s)
        if isinstance(item.outcome, Cancelled):
            return Raised("CancelledError", "The task cancelled itself", "")
        return item.outcome

    def _returned(self, slot: Slot, token: int, now_s: float) -> None:
        held_job = self.slots.remove_job(slot, token)
        self.begun.discard(token)
        if held_job is None or self.given.pop(token, None) is None:
            return
        back: list[HeldJob] = []
        self._not_begun(held_job, back, now_s)
        self.ready.extend(back)

    def _not_begun(self, held_job: HeldJob, back: list[HeldJob], now_s: float) -> None:
        """Settle or keep a job that no runner entered: a drain, a deadline or a lease ends only what has begun."""
        if held_job.stop is not None and isinstance(held_job.stop.outcome, Cancelled):
            self.counts.never_began(held_job)
            self._outbox.endings.append(conclude(held_job.attempt(), held_job.stop.outcome))
            return
        held_job.stop = None
        held_job.queued_s = now_s
        back.append(held_job)

    def _count_one(self) -> None:
        """Count an attempt whose code came to an end by itself."""
        self.processed += 1
        self.ended_since_turn += 1


WAIT_FOR_STATUS_S = 2.0
"""How long to wait for a dead runner's exit status once its death is certain. The fork server reports it within
milliseconds, unless it is frozen or has many processes to kill first."""
BIRTH_S = 10.0
"""How long a job waits for its runner to be born; the fork server needs milliseconds, unless it is frozen."""

log = logger("unstuck.worker")


class RunnerDeaths(HandedJobs):
    def __init__(
        self,
        fork_server: ForkServerClient,
        status_page: StatusPage,
        worker_id: str,
        slots: int,
        selector: selectors.BaseSelector,
        outbox: Outbox,
        pace: Pace,
    ) -> None:
        super().__init__(SlotTable(fork_server, slots, status_page), outbox, pace, JournalWriter(selector, outbox))
        self._fork_server = fork_server
        self._status_page = status_page
        self._worker_id = worker_id
        self._selector = selector
        self._fork_server_gone = False
        self._in_company = False
        """The fork server died, and several jobs with it."""
        self._memory = MemoryLimits()
        self._pauses = OwnPauses(host.boottime_s())
        self.on_death: Callable[[Claimed, float | None], tuple[int, int]] = lambda job, beside_since_s: (0, 0)
        """Hears of every job whose runner died unasked, and when the oldest of the others began. Returns how many
        different jobs died here since one ended otherwise, and how often this one did before."""
        selector.register(fork_server, selectors.EVENT_READ, self._read_fork_server)

    def _read_fork_server(self, _events: int) -> None:
        for report in self._fork_server.read():
            match report:
                case RunnerBorn():
                    self._watch_process(report)
                case RunnerExit():
                    slot = self.slots.slots.get(report.slot)
                    # By id: a late report must not be taken for the end of the next runner in the same slot.
                    if slot is not None and slot.runner.runner_id == report.runner_id:
                        self._runner_gone(slot, report)
                case ForkServerDied():
                    self._replace_fork_server(report.cause)

    def _watch_process(self, born: RunnerBorn) -> None:
        slot = self.slots.slots.get(born.slot)
        if slot is None or slot.runner.pid != born.pid or slot.pidfd is not None or slot.gone_s is not None:
            return
        slot.cgroup = born.cgroup
        self._limit_memory(slot)
        slot.pidfd = slot.runner.pidfd()
        if slot.pidfd is not None:
            self._selector.register(slot.pidfd, selectors.EVENT_READ, lambda _events: self._saw_gone(slot))

    def _saw_gone(self, slot: Slot) -> None:
        """Handle an end that the kernel reported; the fork server reports the exit status shortly after."""
        if slot.gone_s is None:
            slot.gone_s = host.boottime_s()
            for watched in (slot.runner, slot.runner.signals, slot.runner.journal_connection.socket, slot.pidfd):
                if watched is not None:
                    try:
                        self._selector.unregister(watched)
                    except (KeyError, ValueError):
                        pass
            slot.pidfd = None

    def _runner_gone_if_late(self, slot: Slot, now_s: float) -> None:
        """Settle without its exit status what a runner held of whom nobody told how it ended."""
        if slot.gone_s is not None and now_s - self._pauses.excuse(slot.gone_s) > WAIT_FOR_STATUS_S:
            cause = "its process is gone; the exit status is unknown"
            if slot.runner.lives():
                cause = (
                    "its process let go of the worker and lived on, so it was killed: user code closed descriptors "
                    "that it had not opened, or put another program in its place (exec)"
                )
            self._runner_gone(slot, RunnerExit(slot.index, 0, cause))

    def _runner_gone(self, slot: Slot, exit: RunnerExit) -> None:
        """Settle what a dead runner held: what it finished, what it never entered, and what it died in."""
        self._saw_gone(slot)
        self._take_signals(slot)
        self._take_reports(slot)
        self.journal_writer.take(slot)
        now_s = host.boottime_s()
        unsent = {held_job.token for held_job in slot.to_send}
        slot.to_send.clear()
        never_entered = unsent if slot.is_async else unsent | set(slot.runner.take_back())
        if self._status_page.last_pulse_s(slot.index) < slot.opened_s:
            # Its first pulse comes before its first job: it died at birth, or importing the app.
            never_entered = set(slot.jobs)
        back: list[HeldJob] = []
        stillborn = slot.jobs_done == 0 and bool(never_entered) and never_entered >= set(slot.jobs)
        begun = [held_job for held_job in slot.jobs.values() if held_job.token not in never_entered]
        death = of_death(slot, exit, now_s) if begun else None
        if death is not None:
            ended_by_us = next((held_job.stop.kind for held_job in begun if held_job.stop is not None), None)
            self.counts.runner_died(death, ended_by_us)
        for token in list(slot.jobs):
            held_job = self.slots.remove_job(slot, token)
            if token in never_entered or death is None:
                self.begun.discard(token)
            if held_job is None or self.given.pop(token, None) is None:
                continue
            if token in never_entered or death is None:
                self._not_begun(held_job, back, now_s)
            else:
                self._died_in(slot, held_job, exit, death, begun, now_s)
        self.ready.extendleft(reversed(back))
        self.slots.remove(slot)
        self._memory.forget(slot.cgroup)
        slot.runner.close()
        if stillborn:
            rest_s = self.slots.start_failed(now_s)
            log.error("A runner died before it began anything", cause=exit.cause, next_in_s=rest_s)

    def _died_in(
        self, slot: Slot, held_job: HeldJob, exit: RunnerExit, death: Autopsy, begun: list[HeldJob], now_s: float
    ) -> None:
        job = held_job.job
        code = ErrorCode.OUT_OF_MEMORY if exit.oom else ErrorCode.WORKER_CRASHED
        # An expired lease is not a crash, whether the worker or the fork server ended the runner.
        counts = not exit.cause.endswith(LEASE_ENDED)
        # Those whose end we decided ourselves are not among the suspects.
        shared = slot.is_async and sum(1 for other in begun if other.stop is None) > 1
        unasked = held_job.stop is None and counts
        in_a_row, died_here = self.on_death(job, self._beside_since_s(slot)) if unasked else (0, 0)
        lost = "process" if shared else self._lost_together()
        died = Died(exit.cause, code, counts=counts, shared=lost, in_a_row=in_a_row, died_here=died_here)
        began_s = held_job.sent_s if slot.is_async else slot.job_started_s
        ran_s = now_s - began_s
        self.counts.ran(held_job, began_s, ran_s)
        company = [other.job.job_id for other in begun]
        outcome = explain(held_job.stop.outcome if held_job.stop else died, death, held_job, ran_s, company)
        ending = conclude(held_job.attempt(), outcome)
        self._outbox.endings.append(ending)
        if held_job.stop is None:
            self.outcome_log.runner_died(job, ending, exit.cause, exit.pid or slot.runner.pid, now_s)
        else:
            self.outcome_log.ended(job, ending, now_s)
        if not slot.shared:
            stdout, stderr = slot.runner.last_output()
            self._outbox.put_output(Output(job.job_id, job.token, stdout, stderr))
        # Not counted as processed: nothing was done.
        self.ended_since_turn += 1

    def _beside_since_s(self, dead: Slot) -> float | None:
        """Return when the oldest of the jobs began that other runners still run; None if there is none."""
        begun = [
            min(held_job.sent_s for held_job in slot.jobs.values()) if slot.is_async else slot.job_started_s
            for slot in self.slots.slots.values()
            if slot is not dead and slot.jobs and slot.gone_s is None
        ]
        return min(begun, default=None)

    def _lost_together(self) -> Literal["worker"] | None:
        return "worker" if self._in_company else None

    def _take_signals(self, slot: Slot) -> None:
        raise NotImplementedError

    def _limit_memory(self, slot: Slot) -> None:
        """Have the kernel bound the memory of the job that a runner is in, where it can; we look at it in any case."""
        if slot.cgroup and not slot.is_async and slot.jobs:
            self._memory.set_memory_limit(slot.cgroup, next(iter(slot.jobs.values())).policy.memory_limit_bytes)

    # The fork server ------------------------------------------------------------------------------

    def _replace_fork_server(self, cause: str) -> None:
        log.error("The fork server died; starting another", cause=cause)
        self._selector.unregister(self._fork_server)
        crews = list(self.slots.slots.values())
        # Whoever ran then may have killed it, or nobody of them.
        self._in_company = sum(len(slot.jobs) for slot in crews) > 1
        for slot in crews:
            slot.runner.kill()
            self._runner_gone(slot, RunnerExit(slot.index, 0, f"its fork server died ({cause})"))
        self._in_company = False
        self._fork_server.close()
        self.slots.rest_until_s = math.inf
        self._fork_server_gone = True

    def _start_fork_server(self) -> None:
        """Import the app anew. It may take its time, or fail: what the dead left behind was handed in before."""
        self._fork_server.start()
        self._fork_server.configure(self._status_page, self._worker_id)
        self._selector.register(self._fork_server, selectors.EVENT_READ, self._read_fork_server)
        self.slots.rest_until_s = 0.0
        self._fork_server_gone = False

    def _miss_birth(self, slot: Slot, now_s: float) -> None:
        """Replace a fork server that does not answer, unless that would end running jobs; then wait without jobs."""
        if all(other.runner.pid is None for other in self.slots.slots.values() if other.jobs):
            log.error("The fork server does not answer and is killed")
            self._fork_server.kill_fork_server()
            return
        tokens = slot.runner.take_back()
        for token in tokens:
            self._returned(slot, token, now_s)
        if tokens:
            log.error("The fork server does not answer; giving back what waits for a runner", jobs=len(tokens))
            self.slots.rest_until_s = now_s + BIRTH_S
