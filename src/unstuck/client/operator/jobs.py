"""What operators do with jobs: search, cancel, retry, signal, read stacks, prune, list what is quarantined."""

import itertools
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

import msgspec

from unstuck.client import views
from unstuck.client.operator.audit import AuditLog, counted, jobs_named
from unstuck.client.reasons import explain_wait, gather_context
from unstuck.client.why.autopsies import brief_cause
from unstuck.config import Settings
from unstuck.domain.bounds import SHOWN_BYTES
from unstuck.domain.events import EventKind
from unstuck.domain.journal import MAX_SIGNAL_BYTES, MAX_SIGNALS, checked_name
from unstuck.domain.recovery_rules import rules_of_ledger
from unstuck.domain.redaction import Redactor
from unstuck.domain.states import FINAL_STATES, AttemptState, JobState
from unstuck.domain.units import brief
from unstuck.errors import JobNotFound, SignalRefused
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.events import EventRecord
from unstuck.ledger.contract.jobs import AttemptRecord, JobFilter, JobRecord, OutputRecord
from unstuck.ledger.contract.workers import WorkerRecord

# Ids are bigint on every ledger; a larger number cannot be a job.
MAX_JOB_ID = 2**63 - 1
PAGE = 1_000
EVENTS_SHOWN = 200
LOOKED_UP = 20
"""For up to this many jobs the workers or queues to wake are looked up; for more, all are woken."""
RETRIED_BY_DEFAULT = (JobState.FAILED, JobState.QUARANTINED)
CANCELLED_BY_DEFAULT = tuple(state for state in JobState if state not in FINAL_STATES)
PATIENCE_S = 1.0
FIRST_SPAN = 20_000
"""Number of job ids that the first step of a search covers."""
STEP_S = 0.1
"""How long one step should take; the span is made wider or narrower for it."""
MOST_WIDENED = 8.0
LEAST_SPAN = 1_000
LOOK_S = 0.05
ASK_AGAIN_S = 2.0
"""A wake-up may be lost."""

List = Callable[[JobFilter], list[JobRecord]]


@dataclass(frozen=True)
class JobPage:
    jobs: list[JobRecord]
    """Newest first."""
    before_id: int | None
    """The id to continue before, as there may be more; None: that was all."""


class Victim(msgspec.Struct, frozen=True):
    """A process that died while it ran the job."""

    token: int
    at: float | None
    worker: str
    worker_name: str | None
    """None if retention has removed the worker."""
    host: str | None
    kind: str | None
    """What ended it, as one word; None if there is no autopsy."""
    cause: str


class Quarantined(msgspec.Struct, frozen=True):
    """A job that waits for an operator, with the processes that it killed, oldest first."""

    job_id: int
    task: str
    queue: str
    crash_count: int
    enqueued_at: float
    quarantined_at: float | None
    cause: str | None
    victims: tuple[Victim, ...]


class Jobs:
    """Look at jobs and act on them."""

    def __init__(self, ledger: Ledger, settings: Settings, audit: AuditLog) -> None:
        self._ledger = ledger
        self._settings = settings
        self._audit = audit

    def get(self, job_id: int) -> JobRecord:
        """Return a job; raise JobNotFound if it does not exist."""
        record = self._ledger.jobs.get(job_id) if 0 < job_id <= MAX_JOB_ID else None
        if record is None:
            raise JobNotFound(
                f"Job {job_id} does not exist: it was never stored, or was pruned after it ended. "
                "`unstuck jobs` lists those there are."
            )
        return record

    def detail(self, job_id: int) -> views.View:
        """Return all that is known of a job as plain values."""
        record = self.get(job_id)
        workers = self._ledger.workers.list()
        progress = self._ledger.jobs.progress([job_id]).get(job_id)
        context = gather_context(self._ledger, self._settings.recovery.rules, record, workers=workers)
        attempts = self._ledger.jobs.attempts(job_id)
        return views.job_detail(
            record,
            attempts,
            self._ledger.events.list(job_id=job_id, limit=EVENTS_SHOWN),
            {worker.id: worker.name for worker in workers},
            explain_wait(record, context),
            Redactor(self._settings.http.redact),
            views.progress_of(record, progress, attempts),
            None if context.flow is None or context.place is None else views.node_view(context.flow, context.place),
            self._ledger.jobs.journal(job_id, SHOWN_BYTES),
            self._ledger.jobs.signals(job_id, SHOWN_BYTES),
        )

    def search(self, where: JobFilter, patience_s: float = PATIENCE_S) -> JobPage:
        """Return the newest jobs that match. Stop after a while and say where to continue: matches may be rare."""
        return search(self._ledger.jobs.list, where, patience_s)

    def matching(self, where: JobFilter) -> Iterator[int]:
        """Yield the ids of all jobs that match, newest first, page by page; `limit` is ignored."""
        before_id = where.before_id
        while True:
            page = self._ledger.jobs.list(msgspec.structs.replace(where, before_id=before_id, limit=PAGE))
            yield from (job.id for job in page)
            if len(page) < PAGE:
                return
            before_id = page[-1].id

    def outputs(self, job_id: int) -> list[OutputRecord]:
        """Return what the attempts of a job printed; if a whole worker was killed, the last lines are known."""
        self.get(job_id)
        found = {output.token: output for output in self._ledger.jobs.outputs(job_id)}
        attempts = self._ledger.jobs.attempts(job_id)
        for attempt in attempts:
            autopsy = attempt.autopsy
            if attempt.token not in found and autopsy is not None and (autopsy.stdout or autopsy.stderr):
                found[attempt.token] = OutputRecord(attempt.token, autopsy.stdout.encode(), autopsy.stderr.encode())
        # Tokens are in no order on PostgreSQL. What was printed by an attempt that was given back comes first.
        place = {attempt.token: number for number, attempt in enumerate(attempts)}
        return sorted(found.values(), key=lambda output: place.get(output.token, -1))

    def quarantined(self, task: str | None = None, limit: int = PAGE) -> list[Quarantined]:
        """Return quarantined jobs, newest first, each with the processes that it killed."""
        where = JobFilter(states=(JobState.QUARANTINED,), task=task)
        return _find_quarantined(self._ledger, itertools.islice(self.matching(where), limit))

    def cancel(self, job_ids: Collection[int]) -> dict[int, str]:
        """Cancel jobs and tell the workers that run them at once. The answers are those of the ledger."""
        with self._audit.record("cancel", jobs_named(job_ids)) as entry:
            answers = _each_page(job_ids, lambda page: self._ledger.jobs.cancel(page, self._audit.by))
            entry.outcome = counted(answers.values())
        asked = [job_id for job_id, answer in answers.items() if answer == "requested"]
        if len(asked) > LOOKED_UP:
            self._ledger.notify({f"worker:{worker.id}" for worker in self._ledger.workers.list(living_only=True)})
        else:
            self._ledger.notify({f"worker:{job.worker_id}" for job in self._records(asked) if job.worker_id})
        return answers

    def retry(self, job_ids: Collection[int]) -> dict[int, str]:
        """Queue finished jobs again with fresh counters, and wake the workers of their queues."""
        with self._audit.record("retry", jobs_named(job_ids)) as entry:
            answers = _each_page(job_ids, lambda page: self._ledger.jobs.retry(page, self._audit.by))
            entry.outcome = counted(answers.values())
        queued = [job_id for job_id, answer in answers.items() if answer == "queued"]
        if len(queued) > LOOKED_UP:
            self._ledger.notify({f"queue:{queue.name}" for queue in self._ledger.queues.list() if queue.pending})
        else:
            self._ledger.notify({f"queue:{job.queue}" for job in self._records(queued)})
        return answers

    def signal(self, job_id: int, name: str, value: bytes = b"null") -> str:
        """Send a signal with its value (JSON) to a job. Return 'woken' (it waited for it) or 'kept' (until it does)."""
        checked_name(name, "signal")
        answer = "missing"
        if 0 < job_id <= MAX_JOB_ID:
            with self._audit.record("signal", f"{jobs_named([job_id])}: {name}") as entry:
                answer = entry.outcome = self._ledger.jobs.signal(job_id, name, value, self._audit.by)
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

    def ask_stack(self, job_id: int) -> bool:
        """Ask for the stack of a running job, which comes as an event of the job. Return False if it does not run."""
        return _ask_stack(self._ledger, self.get(job_id))

    def stack(self, job_id: int, patience_s: float = 10.0) -> EventRecord | None:
        """Ask for the stack of a running job and wait for it; return None if it does not run, or no answer comes."""
        return _fetch_stack(self._ledger, self.get(job_id).id, patience_s)

    def retention_s(self) -> float:
        """Return the retention of finished jobs: the one that the workers' apps stored, else that of the settings."""
        return rules_of_ledger(self._ledger.recovery.rules(), self._settings.recovery.rules).kept.jobs_s

    def prune(self, older_than_s: float | None = None, states: Collection[JobState] = ()) -> int:
        """Remove finished jobs older than this, or than their retention. Return how many."""
        age_s = self.retention_s() if older_than_s is None else older_than_s
        target = f"{', '.join(sorted(states)) or 'finished'} jobs older than {brief(age_s)}"
        with self._audit.record("prune", target) as entry:
            removed = self._ledger.maintenance.prune(age_s, tuple(state.value for state in states))
            entry.outcome = f"{removed} removed"
        return removed

    def _records(self, job_ids: Iterable[int]) -> list[JobRecord]:
        records = (self._ledger.jobs.get(job_id) for job_id in job_ids)
        return [record for record in records if record is not None]


def search(
    list_jobs: List, where: JobFilter, patience_s: float = PATIENCE_S, clock: Callable[[], float] = time.monotonic
) -> JobPage:
    """Return the newest jobs that match, up to `where.limit`; fewer if the time is up before all were looked at."""
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


def _find_quarantined(ledger: Ledger, job_ids: Iterable[int]) -> list[Quarantined]:
    """Return those of these jobs that are quarantined now."""
    workers: dict[str, WorkerRecord] = {}
    found = []
    for job_id in job_ids:
        job = ledger.jobs.get(job_id)
        if job is None or job.state is not JobState.QUARANTINED:
            continue
        if not workers:
            workers = {worker.id: worker for worker in ledger.workers.list()}
        victims = tuple(
            _victim(attempt, workers.get(attempt.worker_id))
            for attempt in ledger.jobs.attempts(job_id)
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
    """Return it as plain values. The fields are a contract: they are only added to."""
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


def _each_page(job_ids: Collection[int], act: Callable[[list[int]], dict[int, str]]) -> dict[int, str]:
    # An id that no ledger can hold is missing like any other, and must not fail the others.
    possible = [job_id for job_id in dict.fromkeys(job_ids) if 0 < job_id <= MAX_JOB_ID]
    answers: dict[int, str] = {}
    for at in range(0, len(possible), PAGE):
        answers |= act(possible[at : at + PAGE])
    return {job_id: answers.get(job_id, "missing") for job_id in dict.fromkeys(job_ids)}


def _ask_stack(ledger: Ledger, job: JobRecord) -> bool:
    """Ask the worker that runs this job for its stack; return False if the job does not run.

    Best effort like every wake-up: ask again if no answer comes."""
    if job.state is not JobState.RUNNING:
        return False
    ledger.notify({f"stack:{job.worker_id}:{job.id}:{job.token}"})
    return True


def _fetch_stack(ledger: Ledger, job_id: int, patience_s: float) -> EventRecord | None:
    """Ask for the stack of a job and wait for it; return None if it does not run, or no answer comes in time."""
    before = ledger.events.list(job_id=job_id, limit=1)
    after_id = before[-1].id if before else 0
    deadline_s, ask_at_s = time.monotonic() + patience_s, 0.0
    while (now_s := time.monotonic()) < deadline_s:
        if now_s >= ask_at_s:
            ask_at_s = now_s + ASK_AGAIN_S
            job = ledger.jobs.get(job_id)
            if job is None or not _ask_stack(ledger, job):
                return None
        time.sleep(LOOK_S)
        for event in ledger.events.list(job_id=job_id, after_id=after_id):
            if event.kind == EventKind.STACK:
                return event
    return None
