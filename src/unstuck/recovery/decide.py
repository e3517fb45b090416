"""Decide what becomes of each job in the hands of a dead or silent worker. Pure: nothing is written here."""

from collections.abc import Sequence

import msgspec

from unstuck.domain.autopsy import KIND_OF_DETECTOR, MAX_BESIDE, Autopsy, DeathKind, LastWords
from unstuck.domain.endings import Attempt, Cancelled, Died, Ending, Overran, Release, conclude, storable, storable_text
from unstuck.domain.liveness import BY_SILENCE, KERNEL, Detector, Verdict
from unstuck.domain.policy import decode_policy
from unstuck.domain.recovery_rules import RecoveryRules, is_recovered
from unstuck.domain.states import JobState, Transport
from unstuck.domain.units import MAX_DURATION_S, brief
from unstuck.ledger.contract.recovery import WorkerWatch
from unstuck.ledger.contract.workers import HeldRecord

MAX_EVENT_CHARS = 500
OUTCOME_LOST = (
    "; its code had ended before that, but another session's lock kept the outcome from the ledger, and it was lost "
    "with the worker"
)


class WorkerDeath(msgspec.Struct, frozen=True):
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
    ran_together: tuple[int, ...] = ()
    """The jobs that ran when it ended, where more than one did: who of them took it down is not known."""
    already_settled: int = 0
    """What it held besides when it was condemned, and was taken by a sweep that did not get to the end."""
    silent_s: float | None = None
    """How long nothing was heard of it, where that is what it was condemned for."""
    death: Autopsy | None = None
    """What is known of how the worker's own process ended."""
    words: dict[int, LastWords] | None = None
    """By token, what its jobs said last; None if nobody could read that."""
    missing: str = ""
    """Why that could not be read, for people."""

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
        return len(self.ran_together) + self.already_settled > 1

    @property
    def is_certain(self) -> bool:
        """The end of the process is a fact, and not a conclusion from silence."""
        return self.detector is Detector.BOOT or (self.detector in KERNEL and self.cleared)


def ending_of(job: HeldRecord, worker_death: WorkerDeath) -> Ending | Release:
    """Give the write that takes this job from its worker."""
    if job.state is JobState.CLAIMED:
        return Release(job.job_id, job.token, "requeued", worker_death.headline)
    attempt = attempt_of(job)
    never_entered = (
        worker_death.is_certain and worker_death.entered is not None and job.token not in worker_death.entered
    )
    if never_entered and job.cancel_requested:
        return conclude(attempt, Cancelled("cancelled by request before its code began"))
    if never_entered:
        return Release(job.job_id, job.token, "requeued", worker_death.headline)
    died = Died(
        _cause(job, worker_death),
        counts=worker_death.detector is not None,
        drained=worker_death.detector is None,
        shared="worker" if worker_death.shared else None,
        autopsy=_autopsy(job, worker_death),
    )
    ending = conclude(attempt, died)
    if ending.state is not JobState.PENDING:
        return ending
    message = storable_text(f"{worker_death.headline} ({_cause(job, worker_death)})", MAX_EVENT_CHARS)
    return msgspec.structs.replace(
        ending, message=message, delay_s=_delay_s(ending, job, attempt, worker_death.is_certain)
    )


def _cause(job: HeldRecord, worker_death: WorkerDeath) -> str:
    """Say why it ends, and whether its code had ended before: then only the outcome was lost."""
    return f"{worker_death.cause}{OUTCOME_LOST}" if job.deferred else worker_death.cause


def _autopsy(job: HeldRecord, worker_death: WorkerDeath) -> Autopsy:
    """Explain an end that nobody of its own worker is left to explain: by the death of that worker."""
    # Only the first few are looked at: of thousands each would look at thousands.
    named = [job_id for job_id in worker_death.ran_together[: MAX_BESIDE + 1] if job_id != job.job_id]
    begun = worker_death.entered is None or job.token in worker_death.entered
    others = max(0, len(worker_death.ran_together) - begun) + worker_death.already_settled
    detector = worker_death.detector or Detector.OPERATOR
    kind = DeathKind.DRAIN if worker_death.detector is None else KIND_OF_DETECTOR[worker_death.detector]
    death = worker_death.death or Autopsy(kind, "", detector, worker_death.silent_s, host=worker_death.host)
    if worker_death.words is None:
        death = msgspec.structs.replace(death, missing=worker_death.missing)
    elif (said := worker_death.words.get(job.token)) is not None:
        memory_bytes = said.memory_bytes or death.memory_bytes
        death = msgspec.structs.replace(
            death, progress=said.progress, stdout=said.stdout, stderr=said.stderr, memory_bytes=memory_bytes
        )
    return msgspec.structs.replace(
        death,
        summary=_cause(job, worker_death),
        ran_s=round(job.running_s, 3),
        beside=tuple(named[:MAX_BESIDE]),
        beside_count=others,
    )


def overrun(job: HeldRecord) -> Ending:
    """Give the write that ends a job whose hard deadline passed without its worker ending it."""
    attempt = attempt_of(job)
    limit = "its deadline" if job.timeout_s is None else f"its deadline of {brief(job.timeout_s)}"
    cause = f"ran for {brief(job.running_s)}, past {limit}; worker {job.worker_id} did not end it"
    autopsy = Autopsy(kind=DeathKind.DEADLINE, summary=cause, detector=Detector.LEASE, ran_s=round(job.running_s, 3))
    ending = conclude(attempt, Overran(cause, autopsy))
    return msgspec.structs.replace(ending, delay_s=_delay_s(ending, job, attempt, proven=False))


def is_stale(job: HeldRecord, worker: WorkerWatch) -> bool:
    """Return whether the silence of its worker alone is enough to take this job away."""
    patience_s = worker.suspect_after_s if job.state is JobState.CLAIMED else job.heartbeat_timeout_s
    return patience_s is not None and worker.silent_s >= patience_s


PILE_PATIENCE = 2
"""How many times its usual timeout a broker is silent before the jobs are taken that it kept for one worker."""


def pile_patience_s(jobs: Sequence[HeldRecord], worker: WorkerWatch) -> float | None:
    """Return the silence after which the jobs are taken that a broker claimed in advance for a quick worker, and None
    if these are none.

    A Majordomo worker works on one request at a time. Of several the rest waits at its broker, which speaks for it in
    the ledger. Only jobs that may run again are claimed in advance, and only for workers that answer within
    milliseconds, so all of them have ended or were never begun when the broker has been silent for that long."""
    is_pile = worker.transport is Transport.MDP and len(jobs) > 1
    if not is_pile or any(decode_policy(job.policy).on_crash != "retry" for job in jobs):
        return None
    return PILE_PATIENCE * worker.suspect_after_s


def is_left_to_operator(job: HeldRecord, detector: Detector | None, rules: RecoveryRules) -> bool:
    """Return whether an operator wants to decide about the job: never if the kernel saw the death.

    `rules` are those of its worker. The job brings the rules of the app that enqueued it; the more careful hold."""
    if detector not in BY_SILENCE:
        return False
    return not is_recovered(job.state, decode_policy(job.policy), rules)


def death_of(
    worker: WorkerWatch,
    detector: Detector | None,
    evidence: str,
    *,
    cleared: bool = False,
    entered: frozenset[int] | None = None,
    death: Autopsy | None = None,
    words: dict[int, LastWords] | None = None,
    on_this_host: bool = False,
) -> WorkerDeath:
    by_silence = detector in BY_SILENCE
    return WorkerDeath(
        worker.id,
        worker.host,
        detector,
        storable_text(evidence, MAX_EVENT_CHARS),
        cleared,
        entered,
        silent_s=round(min(worker.silent_s, MAX_DURATION_S), 3) if by_silence else None,
        death=death,
        words=words,
        missing=_why_missing(worker, on_this_host) if words is None else "",
    )


def _why_missing(worker: WorkerWatch, on_this_host: bool) -> str:
    """Say why nobody knows what the jobs of a worker said last."""
    if worker.transport is not Transport.PYTHON:
        return ""
    if on_this_host:
        return (
            "What it said last could not be read: the shared memory of its worker is gone, or belongs to another user "
            "or container."
        )
    return (
        f"What it said last could not be read from here: no worker was left on host {worker.host}. The next one that "
        "starts there adds it, unless the machine was restarted or its container removed."
    )


def ran_together(worker_death: WorkerDeath, jobs: Sequence[HeldRecord], held_at_death: int = 0) -> WorkerDeath:
    """Add who ran together when the worker ended; what was only claimed, or never began, had no part in it.

    `jobs` are all that it holds, `held_at_death` how many it held when it was condemned."""
    begun = tuple(
        job.job_id
        for job in jobs
        if job.state is JobState.RUNNING and (worker_death.entered is None or job.token in worker_death.entered)
    )
    return msgspec.structs.replace(worker_death, ran_together=begun, already_settled=max(0, held_at_death - len(jobs)))


def autopsy_of_worker(worker: WorkerWatch, verdict: Verdict, seen: Autopsy | None) -> Autopsy:
    """Write down what is known of how a worker ended; `seen` is what its parent, or it itself, knows of it."""
    by_silence = verdict.detector in BY_SILENCE
    known = seen or Autopsy(KIND_OF_DETECTOR[verdict.detector], "", verdict.detector)
    base = storable(known)
    return msgspec.structs.replace(
        base,
        summary=storable_text(verdict.evidence, MAX_EVENT_CHARS),
        seen_after_s=round(verdict.silent_s, 3) if by_silence else base.seen_after_s,
        pid=worker.pid if worker.transport is Transport.PYTHON else None,
        host=worker.host,
        beside_count=worker.held,
    )


def attempt_of(job: HeldRecord) -> Attempt:
    policy = decode_policy(job.policy)
    return Attempt(
        job.job_id, job.token, policy, job.failures, job.crashes, job.cancel_requested, job.suspected_crashes
    )


def _delay_s(ending: Ending, job: HeldRecord, attempt: Attempt, proven: bool) -> float:
    """Give the wait before the next try: past the end of the lease where two tries must never run at once."""
    if ending.state is not JobState.PENDING or attempt.policy.overlap != "never" or proven:
        return ending.delay_s
    if job.heartbeat_timeout_s is not None:
        lease_s = job.heartbeat_timeout_s - job.silent_s
    else:
        lease_s = (job.timeout_s or 0.0) - job.running_s
    return max(ending.delay_s, lease_s)
