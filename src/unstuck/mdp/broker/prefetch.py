"""How many jobs are claimed ahead for a quick worker, so that it need not wait for a commit between two of them.

Only jobs that may run again (`on_crash="retry"`) are prefetched, or assigned to a worker with prefetched jobs. If the
broker is killed before it has written their outcomes, they run once more. See docs/decisions/piles.md.
"""

from unstuck.domain.policy import decode_policy
from unstuck.ledger.contract.workers import Claimed
from unstuck.mdp.broker.worker_table import Assignment, ConnectedWorker

QUICK_S = 0.02
"""A worker that replies within this time is quick."""
SLOW_S = 0.05
"""How long a worker keeps its prefetched jobs while it works. After that other workers may have them."""
PREFETCH_LIMIT = 32
GATHER_S = 0.002
"""How long a batch waits for more if no worker waits for a job."""
SMALL_BYTES = 64 * 1024
"""Maximum size of the payload of a prefetched job."""


def may_prefetch(job: Claimed) -> bool:
    return job.running and len(job.payload) <= SMALL_BYTES and decode_policy(job.policy).on_crash == "retry"


def claim_count(worker: ConnectedWorker) -> int:
    """Return the number of jobs to claim for a worker now."""
    depth = worker.prefetch_depth
    if worker.is_free:
        return 1 + depth
    if worker.assignment is None or worker.is_claiming or worker.is_draining or 2 * len(worker.prefetched) > depth:
        return 0
    return depth - len(worker.prefetched)


def depth_after_reply(worker: ConnectedWorker, done: Assignment, now_s: float) -> int:
    """Return how many jobs to prefetch from now on. For a quick worker the number doubles while there are enough jobs
    for all workers. For a slow one it halves."""
    if not may_prefetch(done.job):
        return 0
    if now_s - done.since_s > QUICK_S:
        return worker.prefetch_depth // 2
    if worker.found_enough:
        return min(max(1, 2 * worker.prefetch_depth), PREFETCH_LIMIT)
    return worker.prefetch_depth


def is_slow(worker: ConnectedWorker, now_s: float) -> bool:
    """Return whether other workers should have the prefetched jobs of this one."""
    if not worker.prefetched:
        return False
    return worker.assignment is None or worker.is_draining or now_s - worker.assignment.since_s >= SLOW_S


def slow_at_s(worker: ConnectedWorker) -> float | None:
    """Return when a worker with prefetched jobs becomes slow."""
    return worker.assignment.since_s + SLOW_S if worker.prefetched and worker.assignment is not None else None


def is_short(worker: ConnectedWorker) -> bool:
    """Return whether a worker waits for a job, or has none prefetched though it may."""
    return worker.is_free or bool(worker.prefetch_depth and not worker.prefetched)
