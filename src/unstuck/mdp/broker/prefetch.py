"""Jobs that are kept ready behind the one that a quick worker has, so that it need not wait for a commit between two.

Only jobs that may run again (`on_crash="retry"`) are ever on a pile, or in front of one: what a broker had not written
when it was killed is then done once more, and nothing worse. See docs/decisions/piles.md.
"""

from unstuck.domain.policy import decode_policy
from unstuck.ledger.contract.workers import Claimed
from unstuck.mdp.broker import jobs
from unstuck.mdp.broker.outbox import Outbox
from unstuck.mdp.broker.request_addresses import address_of
from unstuck.mdp.broker.worker_table import Assignment, ConnectedWorker
from unstuck.mdp.protocol import broker_request

QUICK_S = 0.02
"""A worker that answers within this is quick."""
SLOW_S = 0.05
"""So long a pile lies behind a job that turned out to be slow; then others may have it."""
PREFETCH_LIMIT = 32
GATHER_S = 0.002
"""So long an order waits for more, where nobody goes short for it."""
SMALL_BYTES = 64 * 1024
"""Of a payload: larger ones are not kept in numbers."""


class Prefetch(Outbox):
    """A peer with a pile always works on something."""

    def _claim_count(self, worker: ConnectedWorker) -> int:
        """Say how many jobs to look for on its behalf."""
        if worker.is_free:
            return 1 + worker.prefetch_depth
        if (
            worker.assignment is None
            or worker.is_claiming
            or worker.is_draining
            or 2 * len(worker.prefetched) > worker.prefetch_depth
        ):
            return 0
        return worker.prefetch_depth - len(worker.prefetched)

    def _on_claimed(self, worker: ConnectedWorker, jobs: tuple[Claimed, ...], wanted: int, now_s: float) -> None:
        """Hand out the first of what was found on its behalf if it has nothing to do, and keep the rest."""
        worker.is_claiming = False
        worker.found_enough = len(jobs) >= wanted
        if not worker.found_enough:
            worker.prefetch_depth //= 2
        if self._closing or self._is_stale(self._batch_sent_s, now_s, is_pile=len(jobs) > 1):
            self._release(worker, jobs, now_s)
            return
        if worker.assignment is None:
            if not jobs:
                worker.found_nothing = True
                self._release_half(worker, now_s)
                return
            self._assign(worker, jobs[0], now_s)
            jobs = jobs[1:]
        assert worker.assignment is not None
        if all(may_prefetch(job) for job in (worker.assignment.job, *jobs)):
            worker.prefetched.extend(jobs)
            worker.prefetched_s = now_s
            for job in jobs:
                self._held_here(job)
        elif jobs:
            worker.prefetch_depth = 0
            self._release(worker, jobs, now_s)

    def _next_job(self, worker: ConnectedWorker, done: Assignment, now_s: float) -> None:
        """It has handed something in: give it the next of its pile. Who is quick gets a higher one, as long as there is
        more than all can take."""
        if not may_prefetch(done.job):
            worker.prefetch_depth = 0
        elif now_s - done.since_s > QUICK_S:
            worker.prefetch_depth //= 2
        elif worker.found_enough:
            worker.prefetch_depth = min(max(1, 2 * worker.prefetch_depth), PREFETCH_LIMIT)
            self._quick.add(worker.worker_id)
        if worker.prefetched and not (
            worker.is_draining or self._closing or self._is_stale(worker.prefetched_s, now_s, is_pile=True)
        ):
            self._assign(worker, worker.prefetched.popleft(), now_s)
        else:
            self._clear_prefetched(worker, now_s)

    def _assign(self, worker: ConnectedWorker, job: Claimed, now_s: float) -> None:
        service = job.task
        assignment = Assignment(job, address_of(job, worker.worker_id, worker.key, service), service, now_s)
        worker.assignment = assignment
        worker.seen_s = now_s
        self._held_here(job)
        quick = worker.prefetch_depth > 0 and may_prefetch(job)
        self._handed_out.give(worker.worker_id, job.job_id, job.token, quick=quick)
        self._send_to_worker(worker, broker_request(assignment.address, jobs.request_of(job)), now_s)

    def _held_here(self, job: Claimed) -> None:
        for waiting in self.requests.of(job.job_id):
            waiting.held_here = True
            waiting.attempt = job.attempt

    def _release(self, worker: ConnectedWorker, jobs: tuple[Claimed, ...], now_s: float) -> None:
        """These never reached it: they go back to where they were, and nobody is told of anything."""
        if jobs:
            self._worker_turn(worker.worker_id).release.extend(jobs)
        for job in jobs:
            self.requests.poll_soon(job.job_id, now_s)

    def _is_stale(self, since_s: float, now_s: float, *, is_pile: bool) -> bool:
        """Say whether we were frozen for so long that others may have what we took then: it must not be handed out.
        What lies on a pile is taken from a silent broker sooner than what a worker has."""
        limit_s = self._busy_timeout_s / 2
        return now_s - since_s > (min(limit_s, self._timeout_s) if is_pile else limit_s)

    def _clear_prefetched(self, worker: ConnectedWorker, now_s: float) -> None:
        self._release(worker, tuple(worker.prefetched), now_s)
        worker.prefetched.clear()

    def _release_half(self, idle: ConnectedWorker, now_s: float) -> None:
        """Somebody found nothing to do: whoever serves the same gives back half of what it has, and takes less."""
        for worker in self._quick_workers():
            if not set(idle.services).isdisjoint(worker.services):
                worker.prefetch_depth //= 2
                half = len(worker.prefetched) // 2
                self._release(worker, tuple(worker.prefetched)[len(worker.prefetched) - half :], now_s)
                for _ in range(half):
                    worker.prefetched.pop()

    def _release_behind_slow_jobs(self, now_s: float) -> None:
        """Let others have what lies behind a job that takes long."""
        for worker in self._quick_workers():
            if worker.prefetched and (
                worker.assignment is None or worker.is_draining or now_s - worker.assignment.since_s >= SLOW_S
            ):
                worker.prefetch_depth = 0
                self._clear_prefetched(worker, now_s)
            if not (worker.prefetched or worker.prefetch_depth):
                self._quick.discard(worker.worker_id)

    def _next_share_s(self) -> float | None:
        since = [
            worker.assignment.since_s
            for worker in self._quick_workers()
            if worker.prefetched and worker.assignment is not None
        ]
        return min(since) + SLOW_S if since else None

    def _gathers_more(self, now_s: float) -> bool:
        """Say whether to wait a moment for more, so that it goes with the same commit: only while nobody goes short."""
        if self._gather_until_s is None or now_s >= self._gather_until_s:
            return False
        if self._backlog.urgent or self._closing:
            return False
        return not any(worker.is_free or (worker.prefetch_depth and not worker.prefetched) for worker in self.workers)

    def _held_by(self, worker_id: str) -> frozenset[tuple[int, int]]:
        worker = self.workers.by_id(worker_id)
        if worker is None or worker.assignment is None:
            return frozenset()
        return frozenset((job.job_id, job.token) for job in (worker.assignment.job, *worker.prefetched))

    def _quick_workers(self) -> list[ConnectedWorker]:
        found = [(worker_id, self.workers.by_id(worker_id)) for worker_id in self._quick]
        self._quick.difference_update(worker_id for worker_id, worker in found if worker is None)
        return [worker for _, worker in found if worker is not None]


def may_prefetch(job: Claimed) -> bool:
    return job.running and len(job.payload) <= SMALL_BYTES and decode_policy(job.policy).on_crash == "retry"
