"""Find jobs, cancel them, queue them again, remove them."""

from collections.abc import Callable, Collection, Iterable, Iterator

import msgspec

from unstuck.client.auditing import counted, jobs_named
from unstuck.client.operator.base import Verbs
from unstuck.client.operator.limits import LOOKED_UP, MAX_JOB_ID, PAGE
from unstuck.domain.durations import brief
from unstuck.domain.rules import rules_of_ledger
from unstuck.domain.states import JobState
from unstuck.store.records import JobFilter, JobRecord


class JobVerbs(Verbs):
    """A part of the operator's verbs."""

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
        with self._audit.note(self._by, "prune", target) as note:
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
