"""What operators do with jobs: search, cancel, retry, signal, read stacks, prune, list what is quarantined."""

import itertools
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

import msgspec

from unstuck.client import views
from unstuck.client.operator.audit import Verbs, counted, jobs_named
from unstuck.client.why.autopsies import brief_cause
from unstuck.domain.events import EventKind
from unstuck.domain.journal import MAX_SIGNAL_BYTES, MAX_SIGNALS, checked_name
from unstuck.domain.recovery_rules import rules_of_ledger
from unstuck.domain.states import FINAL_STATES, AttemptState, JobState
from unstuck.domain.units import brief
from unstuck.errors import JobNotFound, SignalRefused
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.events import EventRecord
from unstuck.ledger.contract.jobs import AttemptRecord, JobFilter, JobRecord, JournalRecord, SignalRecord
from unstuck.ledger.contract.workers import WorkerRecord

# Ids are bigint on every ledger; a larger number cannot be a job.
MAX_JOB_ID = 2**63 - 1
PAGE = 1_000
EVENTS_SHOWN = 200
LOOKED_UP = 20  # Whom to wake is looked up for so many jobs; for more, everybody is woken.
MAX_REASON_CHARS = 500
RETRIED_BY_DEFAULT = (JobState.FAILED, JobState.QUARANTINED)
CANCELLED_BY_DEFAULT = tuple(state for state in JobState if state not in FINAL_STATES)


PATIENCE_S = 1.0
FIRST_SPAN = 20_000
"""Numbers of jobs that are looked through at once, to begin with."""
STEP_S = 0.1
"""How long one step should take; a span is made wider or narrower for it."""
MOST_WIDENED = 8.0
LEAST_SPAN = 1_000

List = Callable[[JobFilter], list[JobRecord]]


@dataclass(frozen=True)
class JobPage:
    jobs: list[JobRecord]
    """Newest first."""
    before_id: int | None
    """Where to go on: there may be more. None: that was all."""


def search(
    list_jobs: List, where: JobFilter, patience_s: float = PATIENCE_S, clock: Callable[[], float] = time.monotonic
) -> JobPage:
    """Give the newest that match, at most `where.limit`; fewer where the time is up before all were looked at."""
    before_id = where.before_id or _after_newest(list_jobs)
    until_s = clock() + patience_s
    jobs: list[JobRecord] = []
    span = FIRST_SPAN
    while before_id > 1:
        began_s = clock()
        from_id = max(1, before_id - span)
        # One more than wanted says whether there are more.
        missing = where.limit - len(jobs) + 1
        jobs += list_jobs(msgspec.structs.replace(where, before_id=before_id, from_id=from_id, limit=missing))
        if len(jobs) > where.limit:
            return JobPage(jobs[: where.limit], jobs[where.limit - 1].id)
        before_id = from_id
        now_s = clock()
        if now_s >= until_s:
            break
        span = max(LEAST_SPAN, int(span * min(MOST_WIDENED, STEP_S / max(now_s - began_s, 1e-6))))
    return JobPage(jobs, before_id if before_id > 1 else None)


def _after_newest(list_jobs: List) -> int:
    newest = list_jobs(JobFilter(limit=1))
    return newest[0].id + 1 if newest else 1


LOOK_S = 0.05
ASK_AGAIN_S = 2.0
"""A ring may be lost."""


def ask_stack(ledger: Ledger, job: JobRecord) -> bool:
    """Ring the worker that runs this job; False where nobody runs it.

    Best effort like every ring: whoever hears nothing may ask again."""
    if job.state is not JobState.RUNNING:
        return False
    ledger.notify({f"stack:{job.worker_id}:{job.id}:{job.token}"})
    return True


def fetch_stack(ledger: Ledger, job_id: int, patience_s: float) -> EventRecord | None:
    """Ask where a job stands and wait for the answer; None where it does not run, or nobody answers in time."""
    before = ledger.events(job_id=job_id, limit=1)
    after_id = before[-1].id if before else 0
    deadline_s, ask_at_s = time.monotonic() + patience_s, 0.0
    while (now_s := time.monotonic()) < deadline_s:
        if now_s >= ask_at_s:
            ask_at_s = now_s + ASK_AGAIN_S
            job = ledger.job(job_id)
            if job is None or not ask_stack(ledger, job):
                return None
        time.sleep(LOOK_S)
        for event in ledger.events(job_id=job_id, after_id=after_id):
            if event.kind == EventKind.STACK:
                return event
    return None


class Victim(msgspec.Struct, frozen=True):
    """A process that died while it ran the job."""

    token: int
    at: float | None
    worker: str
    worker_name: str | None
    """None where retention has removed the worker."""
    host: str | None
    kind: str | None
    """What ended it, as one word; None where there is no autopsy."""
    cause: str


class Quarantined(msgspec.Struct, frozen=True):
    """A job that waits for an operator, with the list of what it killed, oldest first."""

    job_id: int
    task: str
    queue: str
    crash_count: int
    enqueued_at: float
    quarantined_at: float | None
    cause: str | None
    victims: tuple[Victim, ...]


def find_quarantined(ledger: Ledger, job_ids: Iterable[int]) -> list[Quarantined]:
    """Give those of these jobs that are quarantined now."""
    workers: dict[str, WorkerRecord] = {}
    found = []
    for job_id in job_ids:
        job = ledger.job(job_id)
        if job is None or job.state is not JobState.QUARANTINED:
            continue
        if not workers:
            workers = {worker.id: worker for worker in ledger.workers()}
        victims = tuple(
            _victim(attempt, workers.get(attempt.worker_id))
            for attempt in ledger.attempts(job_id)
            if attempt.state is AttemptState.CRASHED
        )
        found.append(
            Quarantined(
                job_id=job.id,
                task=job.task,
                queue=job.queue,
                crash_count=job.crash_count,
                enqueued_at=job.enqueued_at,
                quarantined_at=job.finished_at,
                cause=job.error.cause or job.error.shown if job.error is not None else None,
                victims=victims,
            )
        )
    return found


def quarantined_view(job: Quarantined) -> views.View:
    """Give it as plain values, as every door shows them; the fields are a contract: they are only added to."""
    return {
        "id": job.job_id,
        "task": job.task,
        "queue": job.queue,
        "crash_count": job.crash_count,
        "enqueued_at": views.instant(job.enqueued_at),
        "quarantined_at": views.instant(job.quarantined_at),
        "cause": job.cause,
        "victims": [{**msgspec.structs.asdict(victim), "at": views.instant(victim.at)} for victim in job.victims],
    }


def _victim(attempt: AttemptRecord, worker: WorkerRecord | None) -> Victim:
    autopsy = attempt.autopsy
    host = worker.host if worker is not None else autopsy.host if autopsy is not None else None
    return Victim(
        token=attempt.token,
        at=attempt.ended_at,
        worker=attempt.worker_id,
        worker_name=worker.name if worker is not None else None,
        host=host,
        kind=autopsy.kind.value if autopsy is not None else None,
        cause=brief_cause(autopsy) if autopsy is not None else attempt.cause or "no cause was written down",
    )


class SignalVerbs(Verbs):
    """A part of the operator's verbs."""

    def signal(self, job_id: int, name: str, value: bytes = b"null", by: str | None = None) -> str:
        """Send a signal with its value (JSON) to a job: 'woken' (it waited for it) or 'kept' (until it does)."""
        by = by or self._by
        checked_name(name, "signal")
        answer = "missing"
        if 0 < job_id <= MAX_JOB_ID:
            with self._audit.record(by, "signal", f"{jobs_named([job_id])}: {name}") as note:
                answer = note.outcome = self._ledger.signal(job_id, name, value, by)
        if answer == "missing":
            raise JobNotFound(f"Job {job_id} does not exist: it was never stored, or was pruned after it ended.")
        if answer == "finished":
            raise SignalRefused(f"Job {job_id} has ended, so nobody would take the signal {name!r}.")
        if answer == "workflow":
            raise SignalRefused(
                f"Job {job_id} stands for a workflow, and takes no signals. Send it to the job of a node "
                f"(`unstuck workflow {job_id}` shows them)."
            )
        if answer == "full":
            raise SignalRefused(
                f"Too many signals wait for job {job_id} already: at most {MAX_SIGNALS:,} do, with values of "
                f"{MAX_SIGNAL_BYTES:,} bytes together. Send more when it has taken some (`unstuck why {job_id}` says "
                "what it is doing)."
            )
        return answer

    def journal(self, job_id: int) -> list[JournalRecord]:
        """Give what a job wrote down, in order; its checkpoint, if there is one, comes first."""
        return self._ledger.journal(job_id)

    def signals(self, job_id: int) -> list[SignalRecord]:
        """Give the signals that a job was sent, oldest first."""
        return self._ledger.signals(job_id)


class JobVerbs(Verbs):
    """A part of the operator's verbs."""

    def cancel(self, job_ids: Collection[int], by: str | None = None) -> dict[int, str]:
        """Cancel jobs and tell the workers that run them at once; the answers are those of the ledger's verb."""
        by = by or self._by
        with self._audit.record(by, "cancel", jobs_named(job_ids)) as note:
            answers = _each_page(job_ids, lambda page: self._ledger.cancel(page, by))
            note.outcome = counted(answers.values())
        asked = [job_id for job_id, answer in answers.items() if answer == "requested"]
        if len(asked) > LOOKED_UP:
            self._ring({f"worker:{worker.id}" for worker in self._ledger.workers(living_only=True)})
        else:
            self._ring({f"worker:{job.worker_id}" for job in self._records(asked) if job.worker_id})
        return answers

    def retry(self, job_ids: Collection[int], by: str | None = None) -> dict[int, str]:
        """Queue finished jobs again with fresh counters, and wake who may take them."""
        by = by or self._by
        with self._audit.record(by, "retry", jobs_named(job_ids)) as note:
            answers = _each_page(job_ids, lambda page: self._ledger.retry(page, by))
            note.outcome = counted(answers.values())
        queued = [job_id for job_id, answer in answers.items() if answer == "queued"]
        if len(queued) > LOOKED_UP:
            self._ring({f"queue:{queue.name}" for queue in self._ledger.queues() if queue.pending})
        else:
            self._ring({f"queue:{job.queue}" for job in self._records(queued)})
        return answers

    def _records(self, job_ids: Iterable[int]) -> list[JobRecord]:
        records = (self._ledger.job(job_id) for job_id in job_ids)
        return [record for record in records if record is not None]

    def matching(self, where: JobFilter) -> Iterator[int]:
        """Give the ids of every job that a filter finds, newest first, page by page; `limit` is ignored."""
        before_id = where.before_id
        while True:
            page = self._ledger.jobs(msgspec.structs.replace(where, before_id=before_id, limit=PAGE))
            yield from (job.id for job in page)
            if len(page) < PAGE:
                return
            before_id = page[-1].id

    def kept_jobs_s(self) -> float:
        """Return the retention of finished jobs: the one that the workers' apps stored, else that of the settings."""
        return rules_of_ledger(self._ledger.recovery_rules(), self._settings.recovery.rules).kept.jobs_s

    def prune(self, older_than_s: float | None = None, states: Collection[JobState] = ()) -> int:
        """Remove finished jobs older than given, or than the retention of jobs."""
        age_s = self.kept_jobs_s() if older_than_s is None else older_than_s
        target = f"{', '.join(sorted(states)) or 'finished'} jobs older than {brief(age_s)}"
        with self._audit.record(self._by, "prune", target) as note:
            removed = self._ledger.prune(age_s, tuple(state.value for state in states))
            note.outcome = f"{removed} removed"
        return removed


def _each_page(job_ids: Collection[int], act: Callable[[list[int]], dict[int, str]]) -> dict[int, str]:
    # A number that no ledger can hold is missing like any other, and must not fail those beside it.
    possible = [job_id for job_id in dict.fromkeys(job_ids) if 0 < job_id <= MAX_JOB_ID]
    answers: dict[int, str] = {}
    for at in range(0, len(possible), PAGE):
        answers |= act(possible[at : at + PAGE])
    return {job_id: answers.get(job_id, "missing") for job_id in dict.fromkeys(job_ids)}


class QuarantineVerbs(JobVerbs):
    """A part of the operator's verbs."""

    def quarantined(self, task: str | None = None, limit: int = PAGE) -> list[Quarantined]:
        """List quarantined jobs, newest first, each with all that it killed."""
        where = JobFilter(states=(JobState.QUARANTINED,), task=task)
        return find_quarantined(self._ledger, itertools.islice(self.matching(where), limit))
