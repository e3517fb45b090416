"""Tell at once whoever enqueues to a queue that nobody serves; the job stays queued in case somebody comes.

What was found is believed for a few seconds, so that an ordinary enqueue costs one look into a dict.
"""

import threading
import time
from collections.abc import Sequence

from unstuck.domain.events import EventKind
from unstuck.errors import UnstuckError
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.jobs import NewJob
from unstuck.logs import logger

SERVED_S = 5.0
UNSERVED_S = 1.0
TOLD_AGAIN_S = 60.0
"""The same queue is an event and a line of the log once in so long, however many enqueue to it."""
MOST_PAIRS = 1_000

log = logger("unstuck.client")

Pair = tuple[str, str]


class NoWorkerCheck:
    def __init__(self, ledger: Ledger, name: str = "") -> None:
        self._ledger = ledger
        self._name = name
        self._lock = threading.Lock()
        self._known: dict[Pair, tuple[float, bool]] = {}
        self._told: dict[tuple[Pair, bool], float] = {}

    def warnings(self, jobs: Sequence[NewJob], *, committed: bool = True) -> list[str | None]:
        """Give a sentence for each job that nobody would take now. Never raises: the jobs are stored already.

        What is not committed yet is no event: it may never be. And on SQLite whoever writes it would wait for the
        transaction that waits for them."""
        pairs = {(job.queue, job.task) for job in jobs}
        try:
            unserved = self._unserved(pairs)
        except (UnstuckError, OSError) as error:
            log.debug("Could not see who serves these queues", error=str(error))
            return [None] * len(jobs)
        if not unserved:
            return [None] * len(jobs)
        for pair in unserved:
            self._report(pair, committed)
        return [self._warning((job.queue, job.task)) if (job.queue, job.task) in unserved else None for job in jobs]

    def _warning(self, pair: Pair) -> str:
        # A worker may well be running, on another ledger: so it is said which one this is.
        return f"{_sentence(pair)} (ledger: {self._name})" if self._name else _sentence(pair)

    def _unserved(self, pairs: set[Pair]) -> set[Pair]:
        now_s = time.monotonic()
        with self._lock:
            if len(self._known) > MOST_PAIRS:
                self._known.clear()
            old = [pair for pair in pairs if self._known.get(pair, (0.0, True))[0] < now_s]
        if old:
            found = self._ledger.queues.unserved(old)
            with self._lock:
                for pair in old:
                    served = pair not in found
                    self._known[pair] = (now_s + (SERVED_S if served else UNSERVED_S), served)
        with self._lock:
            return {pair for pair in pairs if not self._known.get(pair, (0.0, True))[1]}

    def _report(self, pair: Pair, committed: bool) -> None:
        now_s = time.monotonic()
        with self._lock:
            if self._told.get((pair, committed), 0.0) > now_s:
                return
            self._told[pair, committed] = now_s + TOLD_AGAIN_S
        queue, task = pair
        sentence = _sentence(pair)
        # Without a set-up of logging a script shows the sentence alone, so the ledger is in it.
        log.warning(self._warning(pair), queue=queue, task=task)
        if not committed:
            return
        try:
            # Whoever comes first tells it for every client of this ledger.
            if self._ledger.maintenance.take_ticket(f"no_workers:{queue}:{task}", TOLD_AGAIN_S):
                self._ledger.events.write(EventKind.NO_WORKERS, sentence)
        except (UnstuckError, OSError) as error:
            log.warning("Could not write the event", kind=EventKind.NO_WORKERS.value, error=str(error))


def _sentence(pair: Pair) -> str:
    queue, task = pair
    return f"No living worker takes task {task!r} from queue {queue!r}: the job stays queued until one comes"
