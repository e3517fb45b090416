"""Decide what becomes of each job in the hands of a dead or silent worker. Pure: nothing is written here."""

from collections.abc import Sequence

import msgspec

from unstuck.config import Recovery
from unstuck.domain.autopsy import KIND_OF_DETECTOR, MAX_BESIDE, Autopsy, DeathKind
from unstuck.domain.durations import MAX_DURATION_S, brief
from unstuck.domain.endings import Ending, Release
from unstuck.domain.liveness import KERNEL, Detector, Verdict
from unstuck.domain.outcomes import Cancelled, Died, Overran
from unstuck.domain.policy import decode_policy
from unstuck.domain.recovery import Attempt, conclude, printable, storable
from unstuck.domain.states import Door, JobState
from unstuck.store.records import HeldJob, WorkerWatch

MAX_EVENT_CHARS = 500


class Grounds(msgspec.Struct, frozen=True):
    """Why a worker's jobs are taken from it, and how sure that is."""

    worker_id: str
    host: str
    detector: Detector | None
    """None: the worker stopped by itself and left something behind."""
    evidence: str
    cleared: bool = False
    """The processes that ran its jobs are known to be gone."""
    entered: frozenset[int] | None = None
    """Tokens whose user code may have begun; None: perhaps all."""
    company: tuple[int, ...] = ()
    """The jobs that ran when it ended, where more than one did: who of them took it down is not known."""
    settled_before: int = 0
    """What it held besides when it was condemned, and was taken by a sweep that did not get to the end."""
    silent_s: float | None = None
    """How long nothing was heard of it, where that is what it was condemned for."""
    death: Autopsy | None = None
    """What is known of how the worker's own process ended."""

    @property
    def cause(self) -> str:
        by = "drain" if self.detector is None else self.detector.value
        return f"worker {self.worker_id} on host {self.host}: {self.evidence} ({by})"

    @property
    def headline(self) -> str:
        return f"Task re-queued due to stale worker: {self.worker_id}"

    @property
    def shared(self) -> bool:
        """Others may have ended it. Of those that were settled before we do not know whether they ran: a sweep that
        is cut in two must not make a culprit of whoever is left."""
        return len(self.company) + self.settled_before > 1

    @property
    def proven(self) -> bool:
        """The end of the process is a fact, and not a conclusion from silence."""
        return self.detector is Detector.BOOT or (self.detector in KERNEL and self.cleared)


def settle(job: HeldJob, grounds: Grounds) -> Ending | Release:
    """Give the write that takes this job from its worker."""
    if job.state is JobState.CLAIMED:
        return Release(job.job_id, job.token, "requeued", grounds.headline)
    attempt = attempt_of(job)
    never_entered = grounds.proven and grounds.entered is not None and job.token not in grounds.entered
    if never_entered and job.cancel_requested:
        return conclude(attempt, Cancelled("cancelled by request before its code began"))
    if never_entered:
        return Release(job.job_id, job.token, "requeued", grounds.headline)
    died = Died(
        grounds.cause,
        counts=grounds.detector is not None,
        drained=grounds.detector is None,
        shared="worker" if grounds.shared else None,
        autopsy=_autopsy(job, grounds),
    )
    ending = conclude(attempt, died)
    if ending.state is not JobState.PENDING:
        return ending
    message = printable(f"{grounds.headline} ({grounds.cause})", MAX_EVENT_CHARS)
    return msgspec.structs.replace(ending, message=message, delay_s=_delay_s(ending, job, attempt, grounds.proven))


def _autopsy(job: HeldJob, grounds: Grounds) -> Autopsy:
    """Explain an end that nobody of its own worker is left to explain: by the death of that worker."""
    # Only the first few are looked at: of thousands each would look at thousands.
    named = [job_id for job_id in grounds.company[: MAX_BESIDE + 1] if job_id != job.job_id]
    begun = grounds.entered is None or job.token in grounds.entered
    others = max(0, len(grounds.company) - begun) + grounds.settled_before
    detector = grounds.detector or Detector.OPERATOR
    kind = DeathKind.DRAIN if grounds.detector is None else KIND_OF_DETECTOR[grounds.detector]
    death = grounds.death or Autopsy(kind, "", detector, grounds.silent_s, host=grounds.host)
    return msgspec.structs.replace(
        death,
        summary=grounds.cause,
        ran_s=round(job.running_s, 3),
        beside=tuple(named[:MAX_BESIDE]),
        beside_count=others,
    )


def overrun(job: HeldJob) -> Ending:
    """Give the write that ends a job whose hard deadline passed without its worker ending it."""
    attempt = attempt_of(job)
    limit = "its deadline" if job.timeout_s is None else f"its deadline of {brief(job.timeout_s)}"
    cause = f"ran for {brief(job.running_s)}, past {limit}; worker {job.worker_id} did not end it"
    autopsy = Autopsy(kind=DeathKind.DEADLINE, summary=cause, detector=Detector.LEASE, ran_s=round(job.running_s, 3))
    ending = conclude(attempt, Overran(cause, autopsy))
    return msgspec.structs.replace(ending, delay_s=_delay_s(ending, job, attempt, proven=False))


def is_stale(job: HeldJob, worker: WorkerWatch) -> bool:
    """Return whether the silence of its worker alone is enough to take this job away."""
    patience_s = worker.suspect_after_s if job.state is JobState.CLAIMED else job.heartbeat_timeout_s
    return patience_s is not None and worker.silent_s >= patience_s


def is_left(job: HeldJob, detector: Detector | None, recovery: Recovery) -> bool:
    """Say whether an operator wants to decide about it: never where the kernel saw the death."""
    if detector not in (Detector.LEASE, Detector.SESSION):
        return False
    switch = recovery.auto_requeue_stale_claimed if job.state is JobState.CLAIMED else recovery.auto_fail_stale_running
    return not switch


def grounds_for(
    worker: WorkerWatch,
    detector: Detector | None,
    evidence: str,
    *,
    cleared: bool = False,
    entered: frozenset[int] | None = None,
    death: Autopsy | None = None,
) -> Grounds:
    by_silence = detector in (Detector.LEASE, Detector.SESSION)
    return Grounds(
        worker.id,
        worker.host,
        detector,
        printable(evidence, MAX_EVENT_CHARS),
        cleared,
        entered,
        silent_s=round(min(worker.silent_s, MAX_DURATION_S), 3) if by_silence else None,
        death=death,
    )


def in_company(grounds: Grounds, jobs: Sequence[HeldJob], held_at_death: int = 0) -> Grounds:
    """Add who ran together when the worker ended; what was only claimed, or never began, had no part in it.

    `jobs` are all that it holds, `held_at_death` how many it held when it was condemned."""
    begun = tuple(
        job.job_id
        for job in jobs
        if job.state is JobState.RUNNING and (grounds.entered is None or job.token in grounds.entered)
    )
    return msgspec.structs.replace(grounds, company=begun, settled_before=max(0, held_at_death - len(jobs)))


def autopsy_of_worker(worker: WorkerWatch, verdict: Verdict, seen: Autopsy | None) -> Autopsy:
    """Write down what is known of how a worker ended; `seen` is what its parent, or it itself, knows of it."""
    by_silence = verdict.detector in (Detector.LEASE, Detector.SESSION)
    known = seen or Autopsy(KIND_OF_DETECTOR[verdict.detector], "", verdict.detector)
    base = storable(known)
    return msgspec.structs.replace(
        base,
        summary=printable(verdict.evidence, MAX_EVENT_CHARS),
        seen_after_s=round(verdict.silent_s, 3) if by_silence else base.seen_after_s,
        pid=worker.pid if worker.door is Door.PYTHON else None,
        host=worker.host,
        beside_count=worker.held,
    )


def attempt_of(job: HeldJob) -> Attempt:
    policy = decode_policy(job.policy)
    return Attempt(job.job_id, job.token, policy, job.failures, job.crashes, job.cancel_requested, job.suspicions)


def _delay_s(ending: Ending, job: HeldJob, attempt: Attempt, proven: bool) -> float:
    """Give the wait before the next try: past the end of the lease where two tries must never run at once."""
    if ending.state is not JobState.PENDING or attempt.policy.overlap != "never" or proven:
        return ending.delay_s
    if job.heartbeat_timeout_s is not None:
        lease_s = job.heartbeat_timeout_s - job.silent_s
    else:
        lease_s = (job.timeout_s or 0.0) - job.running_s
    return max(ending.delay_s, lease_s)
