"""The operator's verbs: look, cancel, retry, pause, drain and settle by hand. Every door uses these."""

import getpass
import itertools
import os
import socket
import time
from collections.abc import Callable, Collection, Iterable, Iterator

from unstuck.client import stale, views
from unstuck.client.activity import MAX_MINUTES, SERIES, Minute, activity
from unstuck.client.admitting import AdmittingVerbs
from unstuck.client.auditing import Auditor, counted, jobs_named, queue_named, silence_named, worker_named
from unstuck.client.doctor import gathering as doctors_facts
from unstuck.client.doctor.examining import examine
from unstuck.client.doctor.facts import Limits
from unstuck.client.doctor.finding import Finding
from unstuck.client.doctor.one_job import examine_job
from unstuck.client.explaining import Surroundings, describe, explain_wait
from unstuck.client.quarantine import Quarantined, find_quarantined, states_of
from unstuck.client.stacks import ask_stack
from unstuck.client.stale import StaleAction as StaleAction
from unstuck.client.why import gathering as evidence
from unstuck.client.why.story import Story
from unstuck.client.why.telling import tell
from unstuck.config import Settings
from unstuck.domain.durations import brief
from unstuck.domain.errors import JobNotFound, UnknownQueue, UnknownWorker
from unstuck.domain.names import did_you_mean
from unstuck.domain.states import FINAL, LIVING, JobState
from unstuck.store.contract import Ledger
from unstuck.store.records import (
    EventRecord,
    JobFilter,
    JobRecord,
    OutputRecord,
    QueueRecord,
    WorkerRecord,
)

# Ids are bigint on every ledger; a larger number cannot be a job.
MAX_JOB_ID = 2**63 - 1
PAGE = 1_000
EVENTS_SHOWN = 200
LOOKED_UP = 20  # Whom to wake is looked up for so many jobs; for more, everybody is woken.
MAX_REASON_CHARS = 500
RETRIED_BY_DEFAULT = (JobState.FAILED, JobState.QUARANTINED)


class Operator(AdmittingVerbs):
    """What an operator can do with a ledger. `by` names who did it, in events, causes and the audit log; `door` says
    which way they came: cli, http, page or python."""

    def __init__(self, ledger: Ledger, settings: Settings, by: str | None = None, door: str = "python") -> None:
        self._ledger = ledger
        self._settings = settings
        self._by = by or whoami()
        self._audit = Auditor(ledger, door)

    # Look -------------------------------------------------------------------------------------

    def job(self, job_id: int) -> JobRecord:
        record = self._ledger.job(job_id) if 0 < job_id <= MAX_JOB_ID else None
        if record is None:
            raise JobNotFound(
                f"Job {job_id} does not exist: it was never stored, or was pruned after it ended. "
                "`unstuck jobs` lists those there are."
            )
        return record

    def job_view(self, job_id: int) -> views.View:
        """Give the whole story of a job as plain values."""
        record = self.job(job_id)
        workers = self._ledger.workers()
        progress = self._ledger.progress([job_id]).get(job_id)
        return views.job_detail(
            record,
            self._ledger.attempts(job_id),
            self._ledger.events(job_id=job_id, limit=EVENTS_SHOWN),
            {worker.id: worker.name for worker in workers},
            explain_wait(record, self._surroundings(record, workers)),
            # What an earlier try said says nothing of this one.
            progress if progress is not None and progress.token == record.token else None,
        )

    def why(self, job_id: int) -> Story:
        """Tell the whole story of a job in plain words: what happened, by which rule, what is next, what to do."""
        record = self.job(job_id)
        return tell(evidence.gather(self._ledger, record, self._surroundings(record)))

    def jobs(self, where: JobFilter) -> list[JobRecord]:
        return self._ledger.jobs(where)

    def outputs(self, job_id: int) -> list[OutputRecord]:
        self.job(job_id)
        return self._ledger.outputs(job_id)

    def events(self, *, after_id: int | None = None, limit: int = 100) -> list[EventRecord]:
        return self._ledger.events(after_id=after_id, limit=limit)

    def workers(self, living_only: bool = False) -> list[WorkerRecord]:
        return self._ledger.workers(living_only)

    def queues(self) -> list[QueueRecord]:
        return self._ledger.queues()

    def activity(self, minutes: int = 60) -> list[Minute]:
        """Say what happened in each of the last minutes, oldest first; the last one is still going on."""
        until = int(time.time() // 60) + 1
        since = until - max(1, min(minutes, MAX_MINUTES))
        return activity(self._ledger.counter_series(SERIES, since), since, until)

    def explain_wait(self, job_id: int) -> str | None:
        """Say why a job is not moving; None when it is finished or runs as it should."""
        record = self.job(job_id)
        return explain_wait(record, self._surroundings(record))

    def doing(self, job_id: int) -> str:
        """Say what a job is doing, in one sentence."""
        record = self.job(job_id)
        return describe(record, self._surroundings(record))

    def doctor(self, limits: Limits | None = None) -> list[Finding]:
        """Look at the whole system and say what is wrong, why, and the cure; the worst first.

        Takes a moment longer where a worker seems to do nothing: it is looked at twice."""
        return examine(doctors_facts.gather(self._ledger, self._settings, limits), limits)

    def doctor_job(self, job_id: int) -> list[Finding]:
        """Say why one job is not running, or how it runs or ended, and what to do."""
        record = self.job(job_id)
        findings = [] if record.state in FINAL else self.doctor()
        return examine_job(record, self._surroundings(record), findings)

    def _surroundings(self, job: JobRecord, workers: list[WorkerRecord] | None = None) -> Surroundings:
        queue = None
        if job.state not in FINAL:
            queue = next((queue for queue in self._ledger.queues() if queue.name == job.queue), None)
        if workers is None:
            workers = self._ledger.workers()
        return Surroundings(queue, workers, self._settings.recovery, time.time())

    # Jobs -------------------------------------------------------------------------------------

    def cancel(self, job_ids: Collection[int], by: str | None = None) -> dict[int, str]:
        """Cancel jobs and tell the workers that run them at once; the answers are those of the ledger's verb."""
        by = by or self._by
        with self._audit.note(by, "cancel", jobs_named(job_ids)) as note:
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
        with self._audit.note(by, "retry", jobs_named(job_ids)) as note:
            answers = self._requeue(job_ids, by)
            note.outcome = counted(answers.values())
        return answers

    def _requeue(self, job_ids: Collection[int], by: str) -> dict[int, str]:
        answers = _each_page(job_ids, lambda page: self._ledger.retry(page, by))
        queued = [job_id for job_id, answer in answers.items() if answer == "queued"]
        if len(queued) > LOOKED_UP:
            self._ring({f"queue:{queue.name}" for queue in self._ledger.queues() if queue.pending})
        else:
            self._ring({f"queue:{job.queue}" for job in self._records(queued)})
        return answers

    def ask_stack(self, job_id: int) -> bool:
        """Ask where a running job stands; the answer comes as an event of the job. False where it does not run."""
        return ask_stack(self._ledger, self.job(job_id))

    def _records(self, job_ids: Iterable[int]) -> list[JobRecord]:
        records = (self._ledger.job(job_id) for job_id in job_ids)
        return [record for record in records if record is not None]

    def matching(self, where: JobFilter) -> Iterator[int]:
        """Give the ids of every job that a filter finds, newest first, page by page; `limit` is ignored."""
        before_id = where.before_id
        while True:
            page = self._ledger.jobs(
                JobFilter(
                    states=where.states,
                    queue=where.queue,
                    task=where.task,
                    error=where.error,
                    older_than_s=where.older_than_s,
                    newer_than_s=where.newer_than_s,
                    worker_id=where.worker_id,
                    before_id=before_id,
                    limit=PAGE,
                )
            )
            yield from (job.id for job in page)
            if len(page) < PAGE:
                return
            before_id = page[-1].id

    def prune(self, older_than_s: float | None = None, states: Collection[JobState] = ()) -> int:
        """Remove finished jobs older than given, or than the retention of jobs."""
        age_s = self._settings.recovery.kept.jobs_s if older_than_s is None else older_than_s
        target = f"{', '.join(sorted(states)) or 'finished'} jobs older than {brief(age_s)}"
        with self._audit.note(self._by, "prune", target) as note:
            removed = self._ledger.prune(age_s, tuple(state.value for state in states))
            note.outcome = f"{removed} removed"
        return removed

    # Quarantine -------------------------------------------------------------------------------

    def quarantined(self, task: str | None = None, limit: int = PAGE) -> list[Quarantined]:
        """List quarantined jobs, newest first, each with all that it killed."""
        where = JobFilter(states=(JobState.QUARANTINED,), task=task)
        return find_quarantined(self._ledger, itertools.islice(self.matching(where), limit))

    def release(self, job_ids: Collection[int], by: str | None = None) -> dict[int, str]:
        """Queue quarantined jobs again with fresh counters; each runs alone in its process.

        'queued', 'missing', 'duplicate' (its unique key is in use), or the state of a job that is not quarantined."""
        by = by or self._by
        with self._audit.note(by, "release", jobs_named(job_ids)) as note:
            answers = self._release(job_ids, by)
            note.outcome = counted(answers.values())
        return answers

    def _release(self, job_ids: Collection[int], by: str) -> dict[int, str]:
        asked = [job_id for job_id in dict.fromkeys(job_ids) if 0 < job_id <= MAX_JOB_ID]
        # One by one is slow for many, and those are nearly always all quarantined.
        many = len(asked) > LOOKED_UP
        held = set(self.matching(JobFilter(states=(JobState.QUARANTINED,)))).intersection(asked) if many else set()
        states = states_of(self._ledger, [job_id for job_id in asked if job_id not in held])
        held |= {job_id for job_id, state in states.items() if state is JobState.QUARANTINED}
        answers = {job_id: state.value for job_id, state in states.items()}
        answers |= self._requeue([job_id for job_id in asked if job_id in held], by)
        return {job_id: answers.get(job_id, "missing") for job_id in dict.fromkeys(job_ids)}

    # Stale ------------------------------------------------------------------------------------

    def stale(self, older_than_s: float = 0.0) -> list[StaleAction]:
        """List held jobs whose worker missed beats for at least so long, or is suspect or dead."""
        return stale.find_stale(self._ledger, older_than_s)

    def fail_stale(self, older_than_s: float | None = None, by: str | None = None) -> list[StaleAction]:
        """Fail stale running jobs; without a threshold each by its own timeout. Gives what was done."""
        by = by or self._by
        with self._audit.note(by, "fail_stale", silence_named(older_than_s)) as note:
            actions = stale.fail_stale(self._ledger, older_than_s, by)
            note.outcome = counted(action.action for action in actions)
        return actions

    def requeue_stale(self, older_than_s: float | None = None, by: str | None = None) -> list[StaleAction]:
        """Give stale claimed jobs back to their queues (and running ones where `on_crash="retry"` and their own
        timeout has passed). Gives what was done."""
        by = by or self._by
        with self._audit.note(by, "requeue_stale", silence_named(older_than_s)) as note:
            actions = stale.requeue_stale(self._ledger, older_than_s, by)
            note.outcome = counted(action.action for action in actions)
        return actions

    # Queues -----------------------------------------------------------------------------------

    def known_queue(self, name: str) -> QueueRecord:
        queues = self._ledger.queues()
        for queue in queues:
            if queue.name == name:
                return queue
        known = [queue.name for queue in queues]
        listed = f" Known: {', '.join(sorted(known)[:10])}." if known else " No queue has been used yet."
        raise UnknownQueue(f"There is no queue {name!r}.{did_you_mean(name, known)}{listed}")

    def pause(self, queue: str | None, by: str | None = None) -> list[str]:
        """Stop handing out jobs of one queue, or of all; give the queues that changed."""
        if queue is not None:
            self.known_queue(queue)
        by = by or self._by
        with self._audit.note(by, "pause", queue_named(queue)) as note:
            changed = self._ledger.pause(queue, by)
            note.outcome = f"{len(changed)} paused"
        return changed

    def resume(self, queue: str | None, by: str | None = None) -> list[str]:
        if queue is not None:
            self.known_queue(queue)
        by = by or self._by
        with self._audit.note(by, "resume", queue_named(queue)) as note:
            changed = self._ledger.resume(queue, by)
            note.outcome = f"{len(changed)} resumed"
        self._ring({f"queue:{name}" for name in changed})
        return changed

    def purge(self, queue: str, by: str | None = None) -> int:
        """Cancel every pending job of a queue; give how many."""
        self.known_queue(queue)
        by = by or self._by
        with self._audit.note(by, "purge", queue_named(queue)) as note:
            cancelled = self._ledger.purge(queue, by)
            note.outcome = f"{cancelled} cancelled"
        return cancelled

    # Workers ----------------------------------------------------------------------------------

    def find_worker(self, text: str) -> WorkerRecord:
        """Find a worker by its id, its name or the beginning of its id; the living are preferred."""
        workers = self._ledger.workers()
        for matches in (
            [worker for worker in workers if worker.id == text],
            [worker for worker in workers if worker.name == text],
            [worker for worker in workers if text and worker.id.startswith(text)],
        ):
            living = [worker for worker in matches if worker.state in LIVING]
            chosen = living or matches[:1]
            if len(chosen) == 1:
                return chosen[0]
            if chosen:
                ids = ", ".join(worker.id for worker in chosen[:5])
                raise UnknownWorker(f"{text!r} could be any of {len(chosen)} workers: {ids}. Give more of the id.")
        known = [name for worker in workers if worker.state in LIVING for name in (worker.name, worker.id)]
        raise UnknownWorker(f"There is no worker {text!r}.{did_you_mean(text, known)} `unstuck workers` lists them.")

    def ask_worker(self, text: str, what: str, by: str | None = None) -> WorkerRecord:
        """Ask a worker to 'drain' or to 'stop' and wake it, so that it hears at once."""
        worker = self.find_worker(text)
        by = by or self._by
        with self._audit.note(by, what, worker_named(worker)):
            if not self._ledger.request(worker.id, what, by):
                raise UnknownWorker(f"Worker {worker.name} ({worker.id}) is {worker.state}; there is nobody to ask.")
        self._ring({f"worker:{worker.id}"})
        return worker

    def disable_worker(self, text: str, reason: str, by: str | None = None) -> tuple[WorkerRecord, set[str]]:
        """Switch a worker off until it is enabled; gives it, and the queues that nobody serves without it."""
        worker = self.find_worker(text)
        if worker.state not in LIVING:
            raise UnknownWorker(f"Worker {worker.name} ({worker.id}) is {worker.state}; there is nobody to disable.")
        by = by or self._by
        with self._audit.note(by, "disable", worker_named(worker)):
            self._ledger.disable(worker.id, reason[:MAX_REASON_CHARS], by)
        self._ring({f"worker:{worker.id}"})
        return worker, self._unserved(set(worker.queues))

    def enable_worker(self, text: str, by: str | None = None) -> tuple[WorkerRecord, bool]:
        """Let a worker take jobs again; gives it as it is now, and whether it was switched off itself."""
        worker = self.find_worker(text)
        by = by or self._by
        with self._audit.note(by, "enable", worker_named(worker)) as note:
            changed = self._ledger.enable(worker.id, by)
            note.outcome = "done" if changed else "it was not disabled"
        self._ring({f"worker:{worker.id}"})
        return self.find_worker(worker.id), changed

    def disable_host(self, host: str, reason: str, by: str | None = None) -> tuple[list[WorkerRecord], set[str]]:
        """Switch off every worker of a host, those to come included; gives the living, and the queues left alone."""
        workers = self._ledger.workers()
        known = {worker.host for worker in workers}
        if host not in known:
            raise UnknownWorker(
                f"No worker is known on host {host!r}.{did_you_mean(host, known)} `unstuck workers` lists them."
            )
        by = by or self._by
        with self._audit.note(by, "disable", f"host {host}"):
            self._ledger.disable_host(host, reason[:MAX_REASON_CHARS], by)
        here = [worker for worker in workers if worker.host == host and worker.state in LIVING]
        self._ring({f"worker:{worker.id}" for worker in here})
        return here, self._unserved({queue for worker in here for queue in worker.queues})

    def enable_host(self, host: str, by: str | None = None) -> tuple[list[WorkerRecord], bool]:
        """Let a host's workers take jobs again; gives the living, and whether it was disabled."""
        by = by or self._by
        with self._audit.note(by, "enable", f"host {host}") as note:
            changed = self._ledger.enable_host(host, by)
            note.outcome = "done" if changed else "it was not disabled"
        here = [worker for worker in self._ledger.workers(living_only=True) if worker.host == host]
        self._ring({f"worker:{worker.id}" for worker in here})
        return here, changed

    def _unserved(self, queues: set[str]) -> set[str]:
        at_work = [worker for worker in self._ledger.workers(living_only=True) if not worker.disabled]
        return queues - {queue for worker in at_work for queue in worker.queues}

    def _ring(self, words: set[str]) -> None:
        if words:
            self._ledger.ring(words)


def whoami() -> str:
    """Name the person at this keyboard, as well as the system knows them."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"


def _each_page(job_ids: Collection[int], act: Callable[[list[int]], dict[int, str]]) -> dict[int, str]:
    # A number that no ledger can hold is missing like any other, and must not fail those beside it.
    possible = [job_id for job_id in dict.fromkeys(job_ids) if 0 < job_id <= MAX_JOB_ID]
    answers: dict[int, str] = {}
    for at in range(0, len(possible), PAGE):
        answers |= act(possible[at : at + PAGE])
    return {job_id: answers.get(job_id, "missing") for job_id in dict.fromkeys(job_ids)}
