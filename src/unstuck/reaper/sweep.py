"""Find the dead and settle what they held: one round at a time, guarded, bounded, safe to be killed anywhere.

Every write repeats its evidence (guard) and carries tokens, so two reapers, or a reaper and a worker that
wakes up, cannot both have a job. A worker that is declared dead can commit nothing more; only then are its
processes ended and its jobs settled. Whatever is left half-done, the next round finds: the dead are watched
until they hold nothing.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from unstuck import failpoints, host, logs
from unstuck.config import Recovery
from unstuck.domain.durations import brief
from unstuck.domain.endings import Ending, Release
from unstuck.domain.errors import WORKER_DIED, LedgerError, LedgerUnavailable
from unstuck.domain.liveness import KERNEL, Detector, Verdict, Vitals, judge
from unstuck.domain.states import LIVING, JobState, WorkerState
from unstuck.reaper import scene, upkeep
from unstuck.reaper.attention import Attention
from unstuck.reaper.evidence import Witness, guard_for, on_one_host
from unstuck.reaper.rounds import Round
from unstuck.reaper.settling import Grounds, grounds_for, is_left, is_stale, overrun, settle
from unstuck.store.contract import Ledger
from unstuck.store.records import (
    Guard,
    GuardDead,
    GuardNone,
    GuardSilent,
    GuardSuspect,
    HeldJob,
    WorkerVerdict,
    WorkerWatch,
)

SWEEP_TICKET = "sweep"
# Shorter than the interval: whoever won the last round must be able to win the next one on time.
TICKET_SHARE = 0.9
HELD_BATCH = 1_000
SETTLE_BATCH = 250
MAX_BATCHES = 50
OVERDUE_BATCH = 500
MAX_LOGGED_JOBS = 20

log = logs.logger("unstuck.reaper")


class Reaper:
    """The watchman's hands. `by` is who he is: a worker's id, 'reaper' or 'supervisor'."""

    def __init__(self, ledger: Ledger, recovery: Recovery, *, by: str) -> None:
        self.ledger = ledger
        self.recovery = recovery
        self.by = by
        self.attention = Attention(host.boottime_s())
        self._known_witness: Witness | None = None
        self._housekeeping = upkeep.Housekeeping()
        self._warned: set[str] = set()
        self._standing: dict[str, WorkerVerdict | None] = {}

    @property
    def witness(self) -> Witness:
        if self._known_witness is None:
            self._known_witness = Witness(one_host=on_one_host(self.ledger))
        return self._known_witness

    # What others call ---------------------------------------------------------------------------

    def round(self, *, ticket: bool = True) -> Round:
        """Judge every worker, settle what the dead held, end what overran, keep house; give the counts."""
        if ticket and not self.ledger.take_ticket(SWEEP_TICKET, self.recovery.check_interval_s * TICKET_SHARE):
            return Round(skipped="ticket")
        done = Round(skipped="" if self.attention.awake else "late")
        try:
            workers = self.ledger.watch()
            done.watched = len(workers)
            self._forget_strangers(workers)
            self._attend(workers, done)
            if self.attention.awake:
                self._end_overdue(workers, done)
            upkeep.promote(self.ledger, done)
            self._housekeeping.run(self.ledger, self.recovery.kept, done)
        finally:
            # What was written before an error must still be heard.
            self._ring(done)
        return done

    def promote(self) -> Round:
        """Only make ready what is due: what a watchman does between two rounds."""
        done = Round()
        upkeep.promote(self.ledger, done)
        self._ring(done)
        return done

    def bury(self, worker_id: str, detector: Detector, evidence: str) -> Round:
        """Take a proof of death (or an operator's word) at once: condemn, clear up, settle all that it held."""
        done = Round()
        near = host.hostname() if detector in KERNEL else None
        worker = next((seen for seen in self.ledger.watch(near) if seen.id == worker_id), None)
        if worker is None:
            return done
        verdict = Verdict(WorkerState.DEAD, detector, evidence, worker.silent_s)
        try:
            # Three neighbours see one death: the first one settles, the sweep looks after all of them.
            if self._condemn(worker, verdict, done) or worker.state not in LIVING:
                self._empty(worker, detector, evidence, done)
        finally:
            self._ring(done)
        return done

    def looks_cut_off(self) -> bool:
        """Say whether every living worker looks dead by silence alone: then it may be us, or the road."""
        living = [worker for worker in self.ledger.watch() if worker.state in LIVING]
        verdicts = [self._judge(self.witness.vitals(worker), lease=True, session=False) for worker in living]
        return bool(living) and all(verdict and verdict.detector is Detector.LEASE for verdict in verdicts)

    # Judging ------------------------------------------------------------------------------------

    def _attend(self, workers: Sequence[WorkerWatch], done: Round) -> None:
        living = [(worker, self.witness.vitals(worker)) for worker in workers if worker.state in LIVING]
        silent = sum(1 for _, vitals in living if self._is_silent(vitals))
        most = silent * 2 > len(living)
        for worker in workers:
            if worker.state not in LIVING:
                self._apart(worker, lambda dead=worker: self._settle_leftover(dead, done))  # type: ignore[misc]
        for worker, vitals in living:
            self._apart(worker, lambda one=worker, seen=vitals: self._act(one, seen, most, done))  # type: ignore[misc]

    def _apart(self, worker: WorkerWatch, act: Callable[[], None]) -> None:
        """Keep the trouble with one worker from the others; an unreachable ledger is everybody's."""
        try:
            act()
        except LedgerUnavailable:
            raise
        except LedgerError:
            log.exception("A worker could not be settled; the next round tries again", worker=worker.id)

    def _is_silent(self, vitals: Vitals) -> bool:
        verdict = self._judge(vitals, lease=True, session=False)
        return vitals.silent_s >= vitals.patience_s and (verdict is None or verdict.detector is Detector.LEASE)

    def _judge(self, vitals: Vitals, *, lease: bool, session: bool) -> Verdict | None:
        return judge(
            vitals,
            session_grace_s=self.recovery.session_grace_s,
            neighbours="neighbours" in self.recovery.evidence,
            session=session and "session" in self.recovery.evidence,
            lease=lease,
        )

    def _act(self, worker: WorkerWatch, vitals: Vitals, most: bool, done: Round) -> None:
        now_s = host.boottime_s()
        lease = self.attention.may_accuse(now_s, timeout_s=worker.suspect_after_s, most=most)
        grace_s = max(self.recovery.session_grace_s, self.recovery.heartbeat_interval_s)
        session = self.attention.may_miss_sessions(now_s, grace_s=grace_s)
        verdict = self._judge(vitals, lease=lease, session=session)
        if verdict is not None and verdict.state is WorkerState.DEAD:
            if not self._leave_to_operator(worker, verdict, done) and self._condemn(worker, verdict, done):
                self._empty(worker, verdict.detector, verdict.evidence, done)
            return
        if verdict is not None:
            self._condemn(worker, verdict, done)
        if lease and vitals.silent_s >= vitals.patience_s and worker.held:
            self._take_stale(worker, done)

    def _condemn(self, worker: WorkerWatch, verdict: Verdict, done: Round) -> bool:
        if worker.state not in LIVING:
            return False
        written = WorkerVerdict(verdict.state, verdict.detector, verdict.evidence, verdict.silent_s, self.by)
        if not self.ledger.condemn(worker.id, written, guard_for(worker, verdict)):
            return False
        facts = {
            "worker": worker.id,
            "worker_name": worker.name,
            "host": worker.host,
            "pid": worker.pid,
            "detector": verdict.detector.value,
            "evidence": verdict.evidence,
            "silent_s": round(verdict.silent_s, 3),
            "held": worker.held,
        }
        if verdict.state is WorkerState.DEAD:
            done.buried[verdict.detector] += 1
            log.error(f"Dead worker detected: {worker.id}", **facts)
        else:
            done.suspected += 1
            log.warning(f"Worker under suspicion: {worker.id}", **facts)
        if failpoints.active:
            failpoints.reached("sweep.after_verdict")
        return True

    # Settling -----------------------------------------------------------------------------------

    def _empty(self, worker: WorkerWatch, detector: Detector | None, evidence: str, done: Round) -> None:
        """Take everything from a worker that is dead in the ledger, and so can write nothing more."""
        near = self.witness.is_neighbour(worker)
        # Its processes end before anybody else may begin the same jobs.
        found = scene.clear(worker.trace) if near else scene.Scene()
        grounds = grounds_for(worker, detector, evidence, cleared=found.cleared, entered=found.entered)
        for _ in range(MAX_BATCHES):
            jobs = self.ledger.held_by(worker.id, HELD_BATCH)
            mine = [job for job in jobs if not is_left(job, detector, self.recovery)]
            self._note_left(worker, len(jobs) - len(mine), done)
            written = self._settle(worker, mine, grounds, lambda _: GuardDead(), done)
            if len(jobs) < HELD_BATCH and len(written) == len(jobs):
                # Only now: a reaper killed before this leaves the marks to the next one.
                if near:
                    scene.forget(worker.trace)
                return
            if not written:
                # Somebody else is at it, or an operator must decide.
                return

    def _settle_leftover(self, worker: WorkerWatch, done: Round) -> None:
        """Go on where an earlier reaper was interrupted, or where a worker stopped without giving back."""
        if worker.state is WorkerState.STOPPED:
            self._empty(worker, None, "it stopped before this job was finished", done)
            return
        standing = self._standing_verdict(worker.id)
        if standing is None:
            self._empty(worker, Detector.OPERATOR, "it is dead in the ledger", done)
        else:
            self._empty(worker, standing.detector, standing.evidence, done)

    def _take_stale(self, worker: WorkerWatch, done: Round) -> None:
        """Take from a silent worker what has waited long enough, each job by its own timeout."""
        jobs = [job for job in self._held(worker) if is_stale(job, worker.suspect_after_s)]
        mine = [job for job in jobs if not is_left(job, Detector.LEASE, self.recovery)]
        self._note_left(worker, len(jobs) - len(mine), done)
        grounds = grounds_for(worker, Detector.LEASE, f"no heartbeat for {brief(worker.silent_s)}")
        written = self._settle(worker, mine, grounds, lambda chunk: _still_silent(chunk, worker), done)
        self._stop_runners(worker, written)

    def _leave_to_operator(self, worker: WorkerWatch, verdict: Verdict, done: Round) -> bool:
        """Keep a worker SUSPECT while it holds what only an operator may touch: if it comes back, nothing is lost."""
        recovery = self.recovery
        if recovery.auto_requeue_stale_claimed and recovery.auto_fail_stale_running:
            return False
        if verdict.detector not in (Detector.LEASE, Detector.SESSION) or not worker.held:
            return False
        jobs = self._held(worker)
        left = [job for job in jobs if is_left(job, verdict.detector, recovery)]
        if not left:
            return False
        if worker.state is not WorkerState.SUSPECT:
            self._condemn(worker, Verdict(WorkerState.SUSPECT, *_reason(verdict)), done)
        by_session = verdict.detector is Detector.SESSION
        mine = [
            job
            for job in jobs
            if not is_left(job, verdict.detector, recovery) and (by_session or is_stale(job, worker.suspect_after_s))
        ]
        self._note_left(worker, len(left), done)
        grounds = grounds_for(worker, verdict.detector, verdict.evidence)
        self._settle(
            worker, mine, grounds, lambda chunk: GuardSuspect() if by_session else _still_silent(chunk, worker), done
        )
        return True

    def _end_overdue(self, workers: Sequence[WorkerWatch], done: Round) -> None:
        """End what ran past its hard deadline in the hands of a worker that is gone, or does not end it."""
        seen = {worker.id: worker for worker in workers}
        late: dict[str, list[HeldJob]] = defaultdict(list)
        for job in self.ledger.overdue(OVERDUE_BATCH):
            late[job.worker_id].append(job)
        for worker_id, jobs in late.items():
            endings = {(job.job_id, job.token): overrun(job) for job in jobs}
            written = self.ledger.settle(worker_id, list(endings.values()), [], GuardNone())
            self._count(worker_id, jobs, endings, written, done)
            if worker := seen.get(worker_id):
                self._stop_runners(worker, written)

    def _settle(
        self,
        worker: WorkerWatch,
        jobs: Sequence[HeldJob],
        grounds: Grounds,
        guard: Callable[[Sequence[HeldJob]], Guard],
        done: Round,
    ) -> set[tuple[int, int]]:
        written: set[tuple[int, int]] = set()
        for start in range(0, len(jobs), SETTLE_BATCH):
            chunk = jobs[start : start + SETTLE_BATCH]
            writes = {(job.job_id, job.token): settle(job, grounds) for job in chunk}
            endings = [write for write in writes.values() if isinstance(write, Ending)]
            releases = [write for write in writes.values() if isinstance(write, Release)]
            if failpoints.active:
                failpoints.reached("sweep.before_settle")
            now = self.ledger.settle(worker.id, endings, releases, guard(chunk))
            if failpoints.active:
                failpoints.reached("sweep.after_settle")
            self._count(worker.id, chunk, writes, now, done)
            written |= now
        return written

    def _stop_runners(self, worker: WorkerWatch, written: Iterable[tuple[int, int]]) -> None:
        # After the write, not before: until it is refused, a worker that wakes up may still have the job.
        tokens = {token for _, token in written}
        if tokens and self.witness.is_neighbour(worker):
            scene.kill_attempts(worker.trace, tokens)

    # Telling ------------------------------------------------------------------------------------

    def _count(
        self,
        worker_id: str,
        jobs: Sequence[HeldJob],
        writes: dict[tuple[int, int], Ending] | dict[tuple[int, int], Ending | Release],
        written: set[tuple[int, int]],
        done: Round,
    ) -> None:
        became: dict[JobState, list[int]] = defaultdict(list)
        for job in jobs:
            key = (job.job_id, job.token)
            if key not in written:
                continue
            write = writes[key]
            state = write.state if isinstance(write, Ending) else JobState.PENDING
            became[state].append(job.job_id)
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
            log.error(WORKER_DIED, worker=worker_id, failed=len(ids), jobs=ids[:MAX_LOGGED_JOBS])
        if ids := became[JobState.QUARANTINED]:
            log.error(f"Quarantined {len(ids)} tasks that killed their workers", worker=worker_id, jobs=ids)

    def _note_left(self, worker: WorkerWatch, count: int, done: Round) -> None:
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

    def _ring(self, done: Round) -> None:
        words = {f"queue:{queue}" for queue in done.queues}
        if done.buried:
            words.add("workers")
        if words:
            self.ledger.ring(words)

    # Looking things up --------------------------------------------------------------------------

    def _held(self, worker: WorkerWatch) -> list[HeldJob]:
        return self.ledger.held_by(worker.id, HELD_BATCH * MAX_BATCHES)

    def _standing_verdict(self, worker_id: str) -> WorkerVerdict | None:
        """Give the verdict that stands; the dead do not change, so it is read once."""
        if worker_id not in self._standing:
            records = {record.id: record for record in self.ledger.workers()}
            self._standing[worker_id] = records[worker_id].verdict if worker_id in records else None
        return self._standing[worker_id]

    def _forget_strangers(self, workers: Sequence[WorkerWatch]) -> None:
        ids = {worker.id for worker in workers}
        self._warned &= ids
        self._standing = {known: verdict for known, verdict in self._standing.items() if known in ids}


def _reason(verdict: Verdict) -> tuple[Detector, str, float]:
    return verdict.detector, f"{verdict.evidence}; recovery is switched off", verdict.silent_s


def _still_silent(jobs: Sequence[HeldJob], worker: WorkerWatch) -> Guard:
    """Repeat the evidence for all of them: as silent as the most patient of these jobs asks."""
    patiences_s = [worker.suspect_after_s if job.state is JobState.CLAIMED else job.heartbeat_timeout_s for job in jobs]
    return GuardSilent(max((patience_s for patience_s in patiences_s if patience_s is not None), default=0.0))
