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
PATIENCE_S = 0.05
"""So long a pile lies behind a job that turned out to be slow; then others may have it."""
PREFETCH_LIMIT = 32
GATHER_S = 0.002
"""So long an order waits for more, where nobody goes short for it."""
SMALL_BYTES = 64 * 1024
"""Of a payload: larger ones are not kept in numbers."""


class Prefetch(Outbox):
    """A peer with a pile always works on something."""

    def _wanted(self, peer: ConnectedWorker) -> int:
        """Say how many jobs to look for on its behalf."""
        if peer.free:
            return 1 + peer.reach
        if peer.doing is None or peer.asking or peer.leaving or 2 * len(peer.pile) > peer.reach:
            return 0
        return peer.reach - len(peer.pile)

    def _found(self, peer: ConnectedWorker, jobs: tuple[Claimed, ...], wanted: int, now_s: float) -> None:
        """Hand out the first of what was found on its behalf if it has nothing to do, and keep the rest."""
        peer.asking = False
        peer.satisfied = len(jobs) >= wanted
        if not peer.satisfied:
            peer.reach //= 2
        if self._closing or self._slept(self._ordered_s, now_s, is_pile=len(jobs) > 1):
            self._give_back(peer, jobs, now_s)
            return
        if peer.doing is None:
            if not jobs:
                peer.empty_handed = True
                self._share_with(peer, now_s)
                return
            self._give(peer, jobs[0], now_s)
            jobs = jobs[1:]
        assert peer.doing is not None
        if all(may_prefetch(job) for job in (peer.doing.job, *jobs)):
            peer.pile.extend(jobs)
            peer.piled_s = now_s
            for job in jobs:
                self._held_here(job)
        elif jobs:
            peer.reach = 0
            self._give_back(peer, jobs, now_s)

    def _go_on(self, peer: ConnectedWorker, done: Assignment, now_s: float) -> None:
        """It has handed something in: give it the next of its pile. Who is quick gets a higher one, as long as there is
        more than all can take."""
        if not may_prefetch(done.job):
            peer.reach = 0
        elif now_s - done.since_s > QUICK_S:
            peer.reach //= 2
        elif peer.satisfied:
            peer.reach = min(max(1, 2 * peer.reach), PREFETCH_LIMIT)
            self._quick.add(peer.worker_id)
        if peer.pile and not (peer.leaving or self._closing or self._slept(peer.piled_s, now_s, is_pile=True)):
            self._give(peer, peer.pile.popleft(), now_s)
        else:
            self._clear_pile(peer, now_s)

    def _give(self, peer: ConnectedWorker, job: Claimed, now_s: float) -> None:
        service = job.task
        doing = Assignment(job, address_of(job, peer.worker_id, peer.key, service), service, now_s)
        peer.doing = doing
        peer.seen_s = now_s
        self._held_here(job)
        quick = peer.reach > 0 and may_prefetch(job)
        self._handed.give(peer.worker_id, job.job_id, job.token, quick=quick)
        self._tell(peer, broker_request(doing.address, jobs.request_of(job)), now_s)

    def _held_here(self, job: Claimed) -> None:
        for waiting in self.requests.of(job.job_id):
            waiting.held_here = True
            waiting.attempt = job.attempt

    def _give_back(self, peer: ConnectedWorker, jobs: tuple[Claimed, ...], now_s: float) -> None:
        """These never reached it: they go back to where they were, and nobody is told of anything."""
        if jobs:
            self._hand(peer.worker_id).release.extend(jobs)
        for job in jobs:
            self.requests.look_soon(job.job_id, now_s)

    def _slept(self, since_s: float, now_s: float, *, is_pile: bool) -> bool:
        """Say whether we were frozen for so long that others may have what we took then: it must not be handed out.
        What lies on a pile is taken from a silent broker sooner than what a worker has."""
        limit_s = self._busy_timeout_s / 2
        return now_s - since_s > (min(limit_s, self._timeout_s) if is_pile else limit_s)

    def _clear_pile(self, peer: ConnectedWorker, now_s: float) -> None:
        self._give_back(peer, tuple(peer.pile), now_s)
        peer.pile.clear()

    def _share_with(self, idle: ConnectedWorker, now_s: float) -> None:
        """Somebody found nothing to do: whoever serves the same gives back half of what it has, and takes less."""
        for peer in self._quick_ones():
            if not set(idle.services).isdisjoint(peer.services):
                peer.reach //= 2
                half = len(peer.pile) // 2
                self._give_back(peer, tuple(peer.pile)[len(peer.pile) - half :], now_s)
                for _ in range(half):
                    peer.pile.pop()

    def _share_out(self, now_s: float) -> None:
        """Let others have what lies behind a job that takes long."""
        for peer in self._quick_ones():
            if peer.pile and (peer.doing is None or peer.leaving or now_s - peer.doing.since_s >= PATIENCE_S):
                peer.reach = 0
                self._clear_pile(peer, now_s)
            if not (peer.pile or peer.reach):
                self._quick.discard(peer.worker_id)

    def _next_share_s(self) -> float | None:
        since = [peer.doing.since_s for peer in self._quick_ones() if peer.pile and peer.doing is not None]
        return min(since) + PATIENCE_S if since else None

    def _gathers(self, now_s: float) -> bool:
        """Say whether to wait a moment for more, so that it goes with the same commit: only while nobody goes short."""
        if self._gather_until_s is None or now_s >= self._gather_until_s:
            return False
        if self._backlog.urgent or self._closing:
            return False
        return not any(peer.free or (peer.reach and not peer.pile) for peer in self.peers)

    def _held_by(self, worker_id: str) -> frozenset[tuple[int, int]]:
        peer = self.peers.by_id(worker_id)
        if peer is None or peer.doing is None:
            return frozenset()
        return frozenset((job.job_id, job.token) for job in (peer.doing.job, *peer.pile))

    def _quick_ones(self) -> list[ConnectedWorker]:
        found = [(worker_id, self.peers.by_id(worker_id)) for worker_id in self._quick]
        self._quick.difference_update(worker_id for worker_id, peer in found if peer is None)
        return [peer for _, peer in found if peer is not None]


def may_prefetch(job: Claimed) -> bool:
    return job.running and len(job.payload) <= SMALL_BYTES and decode_policy(job.policy).on_crash == "retry"
