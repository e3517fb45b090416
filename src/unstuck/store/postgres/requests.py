"""Take jobs in once per request, however often it is sent."""

from collections.abc import Sequence

from unstuck.store.checks import check_jobs
from unstuck.store.postgres.clients import ClientVerbs, columns
from unstuck.store.records import Enqueued, NewJob, OnceAnswer, Request


class RequestVerbs(ClientVerbs):
    def enqueue_once(self, request: Request, jobs: Sequence[NewJob]) -> OnceAnswer:
        check_jobs(jobs)
        with self.client_lane.hold():
            ids = self.job_ids.take(len(jobs))
        values = {
            **columns(range(len(jobs)), ids, jobs),
            "key": request.key,
            "fingerprint": request.fingerprint,
            "keep_s": request.keep_s,
        }
        first, fingerprint, job_ids, fresh = self.past_locks(
            self.client_lane,
            lambda: self.repeat_uncertain(lambda: self.client_lane.write(self.sql["enqueue_once"], values)),
        )[0]
        if fingerprint != request.fingerprint:
            return OnceAnswer((), repeated=True)
        stored = tuple(Enqueued(job_id, new) for job_id, new in zip(job_ids, fresh, strict=True))
        # Where our own ids are there it was us, in a try whose answer was lost.
        return OnceAnswer(stored, repeated=not first and not set(ids) & set(job_ids))
