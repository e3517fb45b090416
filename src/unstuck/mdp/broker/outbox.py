"""What leaves the broker: messages to peers and batches for the ledger. Messages that it drops are counted."""

import time
from collections import Counter
from collections.abc import Callable
from math import inf
from typing import NamedTuple

from unstuck.logs import logger
from unstuck.mdp.broker.backlog import Backlog
from unstuck.mdp.broker.batch import Batch, BatchResult, WorkerTurn
from unstuck.mdp.broker.deferred import Deferred
from unstuck.mdp.broker.worker_table import ConnectedWorker, WorkerTable
from unstuck.metrics.catalogue import MDP_DROPPED
from unstuck.metrics.counters import Counters

LOG_EVERY_S = 60.0
"""Minimum time between two log lines about dropped messages of one kind."""

log = logger("unstuck.mdp")


class DroppedMessages:
    """Counts of dropped messages by reason. The reasons are constants of the broker, so their number is bounded."""

    def __init__(self, counters: Counters | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._counters = counters
        self._clock = clock
        self.counts: Counter[str] = Counter()
        self._logged: dict[str, tuple[float, int]] = {}
        """By reason: when it was logged last, and the count at that time."""

    def add(self, why: str) -> None:
        self.counts[why] += 1
        if self._counters is not None:
            self._counters.add(MDP_DROPPED, (why,))
        now_s = self._clock()
        at_s, before = self._logged.get(why, (-LOG_EVERY_S, 0))
        if now_s - at_s >= LOG_EVERY_S:
            count = self.counts[why]
            self._logged[why] = (now_s, count)
            log.warning("Messages were dropped", why=why, messages=count - before, in_all=count)


class Send(NamedTuple):
    to: bytes
    frames: list[bytes]


class Outbox:
    """Shared by both sides of the broker. While one batch is at the ledger, the next one fills."""

    def __init__(self, dropped: DroppedMessages) -> None:
        self.batch = Batch()
        """The open batch."""
        self.backlog = Backlog()
        self.batch_sent_s = inf
        """When the batch in flight, or the last one, was sent."""
        self.is_closing = False
        """The broker shuts down: it accepts no requests and hands out no jobs."""
        self._dropped = dropped
        self._sends: list[Send] = []
        self._in_flight: Batch | None = None
        self._deferred = Deferred()

    def send(self, to: bytes, frames: list[bytes]) -> None:
        self._sends.append(Send(to, frames))

    def send_to_worker(self, worker: ConnectedWorker, frames: list[bytes], now_s: float) -> None:
        worker.sent_s = now_s
        self.send(worker.identity, frames)

    def take_sends(self) -> list[Send]:
        sends, self._sends = self._sends, []
        return sends

    def drop(self, why: str) -> None:
        """Count a message that is dropped."""
        self._dropped.add(why)

    # Batches --------------------------------------------------------------------------------------

    def worker_turn(self, worker_id: str) -> WorkerTurn:
        """Return the turn of a worker in the open batch."""
        return self.batch.worker_turns.setdefault(worker_id, WorkerTurn())

    @property
    def is_in_flight(self) -> bool:
        return self._in_flight is not None

    @property
    def is_busy(self) -> bool:
        """Return whether anything is still to be written."""
        return not self.batch.empty or not self.backlog.empty or bool(self._deferred) or self.is_in_flight

    def take_batch(self, workers: WorkerTable, now_s: float) -> Batch | None:
        """Close and return the open batch; None if it is empty."""
        batch = self.batch
        self.backlog.fill(batch)
        self._deferred.behind(batch)
        for worker_id, worker_turn in batch.worker_turns.items():
            worker_turn.known_held = workers.held_by(worker_id) | self._deferred.ended(worker_id)
        batch.retried = self._deferred.take(now_s)
        if batch.empty:
            return None
        self.batch, self._in_flight = Batch(), batch
        self.batch_sent_s = now_s
        return batch

    def take_in_flight(self, now_s: float) -> Batch:
        """Return the batch in flight, which the ledger has done."""
        batch, self._in_flight = self._in_flight, None
        assert batch is not None
        self.backlog.note_duration(now_s - self.batch_sent_s)
        return batch

    def defer(self, result: BatchResult, now_s: float, *, again: bool = False) -> None:
        """Keep what was left out of a batch, or of its retried part (`again`)."""
        self._deferred.keep(result.deferred, now_s, again=again)

    def relax(self) -> None:
        """Start with the shortest pause again if nothing is deferred any more."""
        if not self._deferred:
            self._deferred.relax()

    def answered(self, result: BatchResult) -> set[int]:
        """Return jobs whose replies were sent, but which the ledger still had as unanswered with this result."""
        return {*self.batch.answered, *result.deferred.answered, *self._deferred.answered}

    def next_due_s(self) -> float | None:
        """Return when a deferred part is due."""
        return None if self.is_in_flight else self._deferred.due_s
