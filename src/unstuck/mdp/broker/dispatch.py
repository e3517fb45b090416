"""Which worker gets which job: claims on behalf of workers, requests to them, prefetched jobs, releases."""

from unstuck.config import MdpSettings
from unstuck.ledger.contract.workers import Claimed
from unstuck.mdp.broker import jobs, prefetch
from unstuck.mdp.broker.batch import WorkerTurn
from unstuck.mdp.broker.handed_out import HandedOut
from unstuck.mdp.broker.outbox import Outbox
from unstuck.mdp.broker.request_addresses import address_of
from unstuck.mdp.broker.requests import RequestTable
from unstuck.mdp.broker.worker_table import Assignment, ConnectedWorker, WorkerTable
from unstuck.mdp.protocol import broker_request


class Dispatcher:
    """A worker with prefetched jobs always has an assignment too."""

    def __init__(
        self,
        settings: MdpSettings,
        outbox: Outbox,
        requests: RequestTable,
        workers: WorkerTable,
        handed_out: HandedOut,
    ) -> None:
        # Read once: a setting is parsed on each access.
        self._timeout_s = settings.heartbeat_timeout_s
        self._busy_timeout_s = settings.busy_timeout_s
        self._outbox = outbox
        self._requests = requests
        self._workers = workers
        self._handed_out = handed_out
        self._quick: set[str] = set()
        """Ids of workers for which more than one job is claimed at a time."""
        self._gather_until_s: float | None = None
        """The next batch waits for more until then."""

    # Workers --------------------------------------------------------------------------------------

    def add(self, worker: ConnectedWorker, now_s: float) -> None:
        """Record the requests of an old worker from now on. Workers of Unstuck report themselves what they have."""
        if not worker.is_unstuck_worker:
            self._handed_out.add(worker.worker_id, now_s, worker.identity)

    def remove(self, worker: ConnectedWorker) -> None:
        """End the record of a worker that left."""
        self._handed_out.remove(worker.worker_id, worker.seen_s)

    def resume(self, worker: ConnectedWorker, job: Claimed, address: bytes, now_s: float) -> None:
        """Assign a job to the worker that came back with it."""
        worker.assignment = Assignment(job, address, job.task, now_s)
        self._requests.hold_here(job.job_id, job.attempt)

    def finish(self, worker: ConnectedWorker) -> None:
        """Note that a worker has ended its job. `assign_next` must follow."""
        worker.assignment = None
        self._handed_out.take(worker.worker_id)

    def assign_next(self, worker: ConnectedWorker, done: Assignment, now_s: float) -> None:
        """Assign the next prefetched job to a worker that has ended one, and adapt how many are prefetched."""
        worker.prefetch_depth = prefetch.depth_after_reply(worker, done, now_s)
        if worker.prefetch_depth:
            self._quick.add(worker.worker_id)
        may_go_on = not (worker.is_draining or self._outbox.is_closing)
        if worker.prefetched and may_go_on and not self._is_stale(worker.prefetched_s, now_s, prefetched=True):
            self._assign(worker, worker.prefetched.popleft(), now_s)
        else:
            self.release_prefetched(worker, now_s)

    # Claims ---------------------------------------------------------------------------------------

    def add_claims(self) -> None:
        """Add to the open batch what is to be claimed."""
        for worker in self._workers:
            if count := prefetch.claim_count(worker):
                worker.is_claiming = True
                worker_turn = self._outbox.worker_turn(worker.worker_id)
                worker_turn.claim_count, worker_turn.is_idle = count, worker.assignment is None

    def on_claimed(
        self, worker: ConnectedWorker, claimed: tuple[Claimed, ...], worker_turn: WorkerTurn, now_s: float
    ) -> None:
        """Assign the first of the jobs that were claimed for a worker if it is idle, and keep the rest."""
        worker.is_claiming = False
        worker.found_enough = len(claimed) >= worker_turn.claim_count
        if not worker.found_enough:
            worker.prefetch_depth //= 2
        is_stale = self._is_stale(self._outbox.batch_sent_s, now_s, prefetched=len(claimed) > 1)
        if self._outbox.is_closing or is_stale:
            self.release(worker, claimed, now_s)
            return
        if worker.assignment is None:
            if not claimed:
                worker.found_nothing = True
                self._release_half(worker, now_s)
                return
            self._assign(worker, claimed[0], now_s)
            claimed = claimed[1:]
        assert worker.assignment is not None
        if all(prefetch.may_prefetch(job) for job in (worker.assignment.job, *claimed)):
            worker.prefetched.extend(claimed)
            worker.prefetched_s = now_s
            for job in claimed:
                self._requests.hold_here(job.job_id, job.attempt)
        elif claimed:
            worker.prefetch_depth = 0
            self.release(worker, claimed, now_s)

    def is_gathering(self, now_s: float) -> bool:
        """Return whether the next batch waits for more, which it does only while no peer waits for it."""
        if self._gather_until_s is None or now_s >= self._gather_until_s:
            return False
        if self._outbox.backlog.urgent or self._outbox.is_closing:
            return False
        return not any(prefetch.is_short(worker) for worker in self._workers)

    def on_batch_done(self, now_s: float) -> None:
        self._gather_until_s = now_s + prefetch.GATHER_S if self._quick else None

    def _assign(self, worker: ConnectedWorker, job: Claimed, now_s: float) -> None:
        service = job.task
        assignment = Assignment(job, address_of(job, worker.worker_id, worker.key, service), service, now_s)
        worker.assignment = assignment
        worker.seen_s = now_s
        self._requests.hold_here(job.job_id, job.attempt)
        quick = worker.prefetch_depth > 0 and prefetch.may_prefetch(job)
        self._handed_out.give(worker.worker_id, job.job_id, job.token, quick=quick)
        self._outbox.send_to_worker(worker, broker_request(assignment.address, jobs.request_of(job)), now_s)

    def _is_stale(self, since_s: float, now_s: float, *, prefetched: bool) -> bool:
        """Return whether this process was frozen for so long that other workers may have the claims by now.

        A silent broker loses prefetched jobs sooner than the job that a worker has."""
        limit_s = self._busy_timeout_s / 2
        return now_s - since_s > (min(limit_s, self._timeout_s) if prefetched else limit_s)

    # Releases -------------------------------------------------------------------------------------

    def release(self, worker: ConnectedWorker, claimed: tuple[Claimed, ...], now_s: float) -> None:
        """Release jobs that never reached the worker. No client is notified."""
        if claimed:
            self._outbox.worker_turn(worker.worker_id).release.extend(claimed)
        for job in claimed:
            self._requests.poll_soon(job.job_id, now_s)

    def release_prefetched(self, worker: ConnectedWorker, now_s: float) -> None:
        self.release(worker, tuple(worker.prefetched), now_s)
        worker.prefetched.clear()

    def on_tick(self, now_s: float) -> None:
        """Release jobs that are prefetched for workers whose current job takes long."""
        for worker in self._quick_workers():
            if prefetch.is_slow(worker, now_s):
                worker.prefetch_depth = 0
                self.release_prefetched(worker, now_s)
            if not (worker.prefetched or worker.prefetch_depth):
                self._quick.discard(worker.worker_id)

    def next_tick_s(self) -> float | None:
        slow = [at_s for worker in self._quick_workers() if (at_s := prefetch.slow_at_s(worker)) is not None]
        moments = [
            *slow,
            *([] if self._gather_until_s is None or self._outbox.is_in_flight else [self._gather_until_s]),
        ]
        return min(moments, default=None)

    def _release_half(self, idle: ConnectedWorker, now_s: float) -> None:
        """Let workers of the same services release half of their prefetched jobs, since `idle` found none."""
        for worker in self._quick_workers():
            if not set(idle.services).isdisjoint(worker.services):
                worker.prefetch_depth //= 2
                half = len(worker.prefetched) // 2
                self.release(worker, tuple(worker.prefetched)[len(worker.prefetched) - half :], now_s)
                for _ in range(half):
                    worker.prefetched.pop()

    def _quick_workers(self) -> list[ConnectedWorker]:
        found = [(worker_id, self._workers.by_id(worker_id)) for worker_id in self._quick]
        self._quick.difference_update(worker_id for worker_id, worker in found if worker is None)
        return [worker for _, worker in found if worker is not None]
