"""Take from the dead and the silent what they held, and give it back to its queue or to its end.

Every write carries the tokens and repeats its evidence. Nothing is lost by being killed in between: the dead are
watched until they hold nothing, so the next round goes on where this one stopped.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from unstuck import failpoints, logs
from unstuck.domain.autopsy import Autopsy
from unstuck.domain.endings import Ending, Release
from unstuck.domain.liveness import BY_SILENCE, Detector, Process, Verdict, silence
from unstuck.domain.recovery_rules import RecoveryRules
from unstuck.domain.states import JobState
from unstuck.errors import WORKER_DIED, LedgerBusy
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.recovery import Guard, GuardDead, GuardNone, GuardSilent, GuardSuspect, WorkerWatch
from unstuck.ledger.contract.workers import HeldRecord
from unstuck.metrics.catalogue import JOBS_REQUEUED
from unstuck.metrics.counters import Counters
from unstuck.metrics.endings import count_ended
from unstuck.recovery import leftovers
from unstuck.recovery.decide import (
    WorkerDeath,
    death_of,
    ending_of,
    is_left_to_operator,
    is_stale,
    overrun,
    pile_patience_s,
    ran_together,
)
from unstuck.recovery.evidence import Observer
from unstuck.recovery.result import SweepResult

HELD_BATCH = 1_000
SETTLE_BATCH = 250
MAX_BATCHES = 50
OVERDUE_BATCH = 500
MAX_LOGGED_JOBS = 20
OVERDUE = "Jobs ran past their deadline, and their worker did not end them"
SILENT = "Jobs failed: their worker has been silent for longer than they allow"

Key = tuple[int, int]

log = logs.logger("unstuck.recovery")


class Handover:
    """The settling half of the reaper: it is told who is dead, and decides nothing about that."""

    def __init__(
        self, ledger: Ledger, rules_for: Callable[[WorkerWatch], RecoveryRules], observer: Observer, counters: Counters
    ) -> None:
        self._ledger = ledger
        self._rules_for = rules_for
        self._observer = observer
        self._counters = counters
        self._warned: set[str] = set()

    def recover(
        self,
        worker: WorkerWatch,
        detector: Detector | None,
        evidence: str,
        done: SweepResult,
        death: Autopsy | None = None,
        held_at_death: int = 0,
    ) -> None:
        """Take everything from a worker that is dead in the ledger, and so can write nothing more.

        `held_at_death` is for whoever goes on where another sweep was interrupted."""
        # Its processes end before anybody else may begin the same jobs.
        found = self._clear(worker)
        worker_death = death_of(
            worker,
            detector,
            evidence,
            cleared=found.all_gone,
            entered=found.begun_tokens,
            death=death,
            words=found.words,
            on_this_host=self._observer.on_this_host(worker),
        )
        # Of all that it holds, not of one batch: who ran together is judged alike in every batch.
        worker_death = ran_together(worker_death, self._held(worker), held_at_death)
        rules = self._rules_for(worker)
        for _ in range(MAX_BATCHES):
            jobs = self._ledger.recovery.held_jobs(worker.id, HELD_BATCH)
            mine = [job for job in jobs if not is_left_to_operator(job, detector, rules)]
            self._note_left(worker, len(jobs) - len(mine), done)
            written = self._settle(worker, mine, worker_death, lambda _: GuardDead(), done)
            if len(jobs) < HELD_BATCH and len(written) == len(jobs):
                # Only now: a reaper that is killed before this leaves the marks to the next one.
                if self._observer.on_this_host(worker):
                    leftovers.remove_page(worker.status_page)
                return
            if not written:
                # Somebody else is at it, or an operator must decide.
                return

    def take_expired_leases(self, worker: WorkerWatch, done: SweepResult) -> None:
        """Take from a silent worker what has waited long enough, each job by its own timeout."""
        worker_death = self._silent_death(worker, Detector.LEASE, silence(worker.silent_s))
        jobs = self._held(worker)
        self._take(worker, jobs, ran_together(worker_death, jobs), done)

    def left_to_operator(self, worker: WorkerWatch, verdict: Verdict, done: SweepResult) -> bool:
        """Say whether this worker holds what only an operator may touch; what nobody protects is taken all the same."""
        if verdict.detector not in BY_SILENCE or not worker.held:
            return False
        jobs = self._held(worker)
        rules = self._rules_for(worker)
        if not any(is_left_to_operator(job, verdict.detector, rules) for job in jobs):
            return False
        worker_death = self._silent_death(worker, verdict.detector, verdict.evidence)
        self._take(worker, jobs, ran_together(worker_death, jobs), done)
        return True

    def end_overdue(self, workers: Sequence[WorkerWatch], done: SweepResult) -> None:
        """End what ran past its hard deadline in the hands of a worker that is gone, or does not end it."""
        seen = {worker.id: worker for worker in workers}
        late: dict[str, list[HeldRecord]] = defaultdict(list)
        busy: LedgerBusy | None = None
        for job in self._ledger.recovery.overdue(OVERDUE_BATCH):
            late[job.worker_id].append(job)
        for worker_id, jobs in late.items():
            endings = {(job.job_id, job.token): overrun(job) for job in jobs}
            try:
                written = self._ledger.recovery.settle(worker_id, list(endings.values()), [], GuardNone())
            except LedgerBusy as error:
                # Those of other workers go on; the round is told afterwards.
                busy = error
                continue
            self._record(worker_id, jobs, endings, written, done, OVERDUE)
            if worker := seen.get(worker_id):
                self._stop_runners(worker, written)
        if busy is not None:
            raise busy

    def forget_all_but(self, worker_ids: set[str]) -> None:
        """Forget whom we warned about, where nobody watches them any more."""
        self._warned &= worker_ids

    # ------------------------------------------------------------------------------------------

    def _take(
        self, worker: WorkerWatch, jobs: Sequence[HeldRecord], worker_death: WorkerDeath, done: SweepResult
    ) -> None:
        by_session = worker_death.detector is Detector.SESSION
        pile_s = pile_patience_s(jobs, worker)
        is_lost_pile = pile_s is not None and worker.silent_s >= pile_s
        stale = [job for job in jobs if by_session or is_lost_pile or is_stale(job, worker)]
        rules = self._rules_for(worker)
        mine = [job for job in stale if not is_left_to_operator(job, worker_death.detector, rules)]
        self._note_left(worker, len(stale) - len(mine), done)

        def guard(chunk: Sequence[HeldRecord]) -> Guard:
            if pile_s is not None and is_lost_pile:
                return GuardSilent(pile_s)
            return GuardSuspect() if by_session else _still_silent(chunk, worker)

        written = self._settle(worker, mine, worker_death, guard, done, SILENT)
        self._stop_runners(worker, written)

    def _settle(
        self,
        worker: WorkerWatch,
        jobs: Sequence[HeldRecord],
        worker_death: WorkerDeath,
        guard: Callable[[Sequence[HeldRecord]], Guard],
        done: SweepResult,
        headline: str = WORKER_DIED,
    ) -> set[Key]:
        written: set[Key] = set()
        for start in range(0, len(jobs), SETTLE_BATCH):
            chunk = jobs[start : start + SETTLE_BATCH]
            writes = {(job.job_id, job.token): ending_of(job, worker_death) for job in chunk}
            endings = [write for write in writes.values() if isinstance(write, Ending)]
            releases = [write for write in writes.values() if isinstance(write, Release)]
            if failpoints.active:
                failpoints.reached("reap.before_settle")
            now = self._ledger.recovery.settle(worker.id, endings, releases, guard(chunk))
            if failpoints.active:
                failpoints.reached("reap.after_settle")
            self._record(worker.id, chunk, writes, now, done, headline)
            written |= now
        return written

    def _record(
        self,
        worker_id: str,
        jobs: Sequence[HeldRecord],
        writes: Mapping[Key, Ending | Release],
        written: set[Key],
        done: SweepResult,
        headline: str,
    ) -> None:
        for job, state in _count_and_log(worker_id, jobs, writes, written, done, headline):
            if state is JobState.PENDING:
                self._counters.add(JOBS_REQUEUED, (job.queue,))
            else:
                count_ended(self._counters, job.queue, job.task, state)

    def _clear(self, worker: WorkerWatch) -> leftovers.Leftovers:
        observer = self._observer
        if not observer.on_this_host(worker):
            return leftovers.Leftovers()
        # A frozen worker may wake up and go on under a new id, with the same fork server.
        return leftovers.kill(worker.status_page, fork_server=observer.process_of(worker) is Process.GONE)

    def _silent_death(self, worker: WorkerWatch, detector: Detector, evidence: str) -> WorkerDeath:
        on_this_host = self._observer.on_this_host(worker)
        words = leftovers.last_words(worker.status_page) if on_this_host else None
        return death_of(worker, detector, evidence, words=words, on_this_host=on_this_host)

    def _stop_runners(self, worker: WorkerWatch, written: Iterable[Key]) -> None:
        # After the write, not before: until it is refused, a worker that wakes up may still have the job.
        tokens = {token for _, token in written}
        if tokens and self._observer.on_this_host(worker):
            leftovers.kill_attempts(worker.status_page, tokens)

    def _held(self, worker: WorkerWatch) -> list[HeldRecord]:
        return self._ledger.recovery.held_jobs(worker.id, HELD_BATCH * MAX_BATCHES)

    def _note_left(self, worker: WorkerWatch, count: int, done: SweepResult) -> None:
        done.left += count
        if count and worker.id not in self._warned:
            self._warned.add(worker.id)
            log.warning(
                f"{count} stale tasks are left for an operator: recovery is switched off. "
                "See them with 'unstuck stale', settle them with --fail or --requeue.",
                worker=worker.id,
                host=worker.host,
                stale=count,
            )


def _still_silent(jobs: Sequence[HeldRecord], worker: WorkerWatch) -> Guard:
    """Repeat the evidence for all of them: as silent as the most patient of these jobs asks."""
    patiences_s = [worker.suspect_after_s if job.state is JobState.CLAIMED else job.heartbeat_timeout_s for job in jobs]
    return GuardSilent(max((patience_s for patience_s in patiences_s if patience_s is not None), default=0.0))


def _count_and_log(
    worker_id: str,
    jobs: Sequence[HeldRecord],
    writes: Mapping[Key, Ending | Release],
    written: set[Key],
    done: SweepResult,
    headline: str,
) -> list[tuple[HeldRecord, JobState]]:
    """Add what was really written to the round, and say it in the log; return each job with its new state."""
    became: dict[JobState, list[int]] = defaultdict(list)
    settled: list[tuple[HeldRecord, JobState]] = []
    for job in jobs:
        if (job.job_id, job.token) not in written:
            continue
        write = writes[job.job_id, job.token]
        state = write.state if isinstance(write, Ending) else JobState.PENDING
        became[state].append(job.job_id)
        settled.append((job, state))
        if state is JobState.PENDING:
            done.queues.add(job.queue)
            if isinstance(write, Ending):
                done.due_in(write.delay_s)
    done.requeued += len(became[JobState.PENDING])
    done.failed += len(became[JobState.FAILED])
    done.quarantined += len(became[JobState.QUARANTINED])
    done.cancelled += len(became[JobState.CANCELLED])
    if ids := became[JobState.PENDING]:
        log.warning(f"Re-queued {len(ids)} stale tasks", worker=worker_id, jobs=ids[:MAX_LOGGED_JOBS])
    if ids := became[JobState.FAILED]:
        log.error(headline, worker=worker_id, failed=len(ids), jobs=ids[:MAX_LOGGED_JOBS])
    if ids := became[JobState.QUARANTINED]:
        log.error(f"Quarantined {len(ids)} tasks that killed their workers", worker=worker_id, jobs=ids)
    return settled
