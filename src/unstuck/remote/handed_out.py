"""Remember which jobs this process handed out, so that a plain success needs no look into the ledger."""

import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from unstuck.ledger.contract.workers import Claimed

MAX_REMEMBERED = 100_000

Key = tuple[int, int]


class HandedJob(NamedTuple):
    worker_id: str
    task: str
    queue: str
    since_s: float
    """When it was handed out, by the monotonic clock."""


class HandedJobs:
    """Belongs to the event loop. Only a memory: whatever is missing here is looked up."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[Key, HandedJob] = OrderedDict()
        self._of_worker: dict[str, set[Key]] = {}

    def add(self, worker_id: str, jobs: Sequence[Claimed]) -> None:
        if not jobs:
            return
        now_s = time.monotonic()
        held = self._of_worker.setdefault(worker_id, set())
        for job in jobs:
            key = (job.job_id, job.token)
            self._jobs[key] = HandedJob(worker_id, job.task, job.queue, now_s)
            held.add(key)
        while len(self._jobs) > MAX_REMEMBERED:
            self.forget(next(iter(self._jobs)))

    def get(self, worker_id: str, key: Key) -> HandedJob | None:
        job = self._jobs.get(key)
        return job if job is not None and job.worker_id == worker_id else None

    def tokens(self, worker_id: str) -> set[int]:
        """Return the tokens that this worker was given here and has not settled here."""
        return {token for _, token in self._of_worker.get(worker_id, ())}

    def forget(self, key: Key) -> None:
        job = self._jobs.pop(key, None)
        if job is None:
            return
        held = self._of_worker[job.worker_id]
        held.discard(key)
        if not held:
            del self._of_worker[job.worker_id]
