"""Gather what the ledger knows of a job; everything after this is pure."""

from collections.abc import Sequence

import msgspec

from unstuck.client.explaining import Surroundings
from unstuck.domain.endings import JobError
from unstuck.domain.policy import Policy, decode_policy
from unstuck.domain.states import FINAL, AttemptState
from unstuck.store.contract import Ledger
from unstuck.store.records import (
    AttemptRecord,
    EventRecord,
    JobRecord,
    JournalRecord,
    OutputRecord,
    Progress,
    WorkerRecord,
)

MAX_EVENTS = 500
"""The newest; a job with more has been through the same many times."""
RETRIED = "retried"
"""The kind of the event that an operator's retry writes."""


class Evidence(msgspec.Struct, frozen=True):
    """All that a story is made of, at one instant."""

    job: JobRecord
    attempts: Sequence[AttemptRecord]
    events: Sequence[EventRecord]
    outputs: Sequence[OutputRecord]
    progress: Progress | None
    around: Surroundings
    journal: Sequence[JournalRecord] = ()

    @property
    def policy(self) -> Policy:
        return decode_policy(self.job.policy)

    def worker(self, worker_id: str | None) -> WorkerRecord | None:
        """Give a worker; None where retention has removed it."""
        return next((worker for worker in self.around.workers if worker.id == worker_id), None)

    def error_of(self, attempt: AttemptRecord) -> JobError | None:
        """Give the whole error of a try where it is still known: the job keeps the last one only."""
        ended = [one.token for one in self.attempts if one.ended_at is not None]
        error = self.job.error
        return error if error is not None and ended[-1:] == [attempt.token] and error.code == attempt.code else None

    def output(self, token: int) -> OutputRecord | None:
        return next((output for output in self.outputs if output.token == token), None)


def gather(ledger: Ledger, job: JobRecord, around: Surroundings) -> Evidence:
    return Evidence(
        job,
        ledger.attempts(job.id),
        ledger.events(job_id=job.id, limit=MAX_EVENTS),
        ledger.outputs(job.id),
        ledger.progress([job.id]).get(job.id),
        around,
        ledger.journal(job.id),
    )


class Try(msgspec.Struct, frozen=True):
    """One attempt with its place among the others."""

    number: int
    attempt: AttemptRecord
    waited_from: float
    """Since when it could have been claimed, as far as that is known."""
    failures: int
    """Tries that user code failed, this one included, since the counters were last fresh."""
    crashes: int
    """Deaths, this one included, since the counters were last fresh; suspicions are among them."""
    closes: bool
    """The job ended with it: it is the last, or an operator queued the job again after it."""


def tries_of(evidence: Evidence) -> list[Try]:
    """Number the attempts and count as the rules did; a retry by hand starts the counters afresh."""
    retried = [event.at for event in evidence.events if event.kind == RETRIED]
    found: list[Try] = []
    failures = crashes = 0
    since = evidence.job.enqueued_at
    for at, attempt in enumerate(evidence.attempts):
        began = _began(attempt, since)
        again = [moment for moment in retried if since <= moment <= began]
        if again:
            failures = crashes = 0
            since = again[-1]
        failures += attempt.state is AttemptState.FAILED
        crashes += attempt.state is AttemptState.CRASHED
        ended = attempt.ended_at
        following = evidence.attempts[at + 1] if at + 1 < len(evidence.attempts) else None
        until = evidence.around.now_s if following is None else _began(following, evidence.around.now_s)
        closes = ended is not None and (
            any(ended <= moment <= until for moment in retried)
            # A job that ended keeps the token of the try that ended it.
            or (evidence.job.state in FINAL and attempt.token == evidence.job.token)
        )
        found.append(Try(at + 1, attempt, since, failures, crashes, closes))
        since = since if ended is None else ended
    return found


def _began(attempt: AttemptRecord, otherwise: float) -> float:
    moments = (attempt.claimed_at, attempt.started_at)
    return min((moment for moment in moments if moment is not None), default=otherwise)
