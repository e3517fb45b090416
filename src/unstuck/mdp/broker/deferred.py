"""Parts of batches that wait because another database session holds a lock, and what must wait behind them."""

from unstuck.mdp.broker.batch import Batch
from unstuck.mdp.broker.exchange_parts import Key, merge, outcome_keys

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0


class Deferred:
    """The end of a worker waits for its deferred turn, and requests of a client keep their order. All else goes on."""

    def __init__(self) -> None:
        self._batch = Batch()
        self._pause_s = FIRST_PAUSE_S
        self._due_s: float | None = None

    def __bool__(self) -> bool:
        return self._due_s is not None

    @property
    def due_s(self) -> float | None:
        return self._due_s

    @property
    def answered(self) -> list[int]:
        """Jobs whose replies were sent, which the ledger does not know yet."""
        return self._batch.answered

    def keep(self, left: Batch, now_s: float, *, again: bool = False) -> None:
        """Keep what was left out of a batch. `again`: it was deferred before, so the pause doubles."""
        if left.empty:
            return
        if again:
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        merge(self._batch, left)
        self._due_s = now_s + self._pause_s

    def behind(self, batch: Batch) -> None:
        """Take out of a batch what must wait for something that is deferred."""
        if not self:
            return
        kept = self._batch
        clients = {post.request.client for post in kept.posts}
        more = Batch(
            posts=[post for post in batch.posts if post.request.client in clients],
            deaths=[death for death in batch.deaths if kept.concerns(death.worker_id)],
            stale_registrations=[worker_id for worker_id in batch.stale_registrations if kept.concerns(worker_id)],
            retired=[worker_id for worker_id in batch.retired if kept.concerns(worker_id)],
            abandoned=[one for one in batch.abandoned if kept.concerns(one.worker_id)],
        )
        batch.posts = [post for post in batch.posts if post.request.client not in clients]
        batch.deaths = [death for death in batch.deaths if not kept.concerns(death.worker_id)]
        batch.stale_registrations = [
            worker_id for worker_id in batch.stale_registrations if not kept.concerns(worker_id)
        ]
        batch.retired = [worker_id for worker_id in batch.retired if not kept.concerns(worker_id)]
        batch.abandoned = [one for one in batch.abandoned if not kept.concerns(one.worker_id)]
        merge(kept, more)

    def take(self, now_s: float) -> Batch | None:
        """Remove and return what is due."""
        if self._due_s is None or now_s < self._due_s:
            return None
        batch, self._batch = self._batch, Batch()
        self._due_s = None
        return batch

    def relax(self) -> None:
        """Start with the first pause again, since nothing is deferred any more."""
        self._pause_s = FIRST_PAUSE_S

    def ended(self, worker_id: str) -> set[Key]:
        """Return the attempts of a worker that are over, which the ledger does not know yet."""
        worker_turn = self._batch.worker_turns.get(worker_id)
        return set() if worker_turn is None else set(outcome_keys(worker_turn))
