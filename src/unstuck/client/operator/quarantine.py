"""Show what is quarantined, and let it go."""

import itertools
from collections.abc import Collection

from unstuck.client.auditing import counted, jobs_named
from unstuck.client.operator.jobs import JobVerbs
from unstuck.client.operator.limits import LOOKED_UP, MAX_JOB_ID, PAGE
from unstuck.client.quarantine import Quarantined, find_quarantined, states_of
from unstuck.domain.states import JobState
from unstuck.store.records import JobFilter


class QuarantineVerbs(JobVerbs):
    """A part of the operator's verbs."""

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
