"""Read the ledger's gauges and counters and give them as Prometheus wants them.

Bounded in cost, however many jobs there are: unfinished jobs are counted by their own small indexes, finished ones were
counted when they ended.
"""

import math
import threading
import time

from unstuck.domain.states import FINAL
from unstuck.metrics import catalogue
from unstuck.metrics.catalogue import Gauge
from unstuck.metrics.exposition import Readings, expose
from unstuck.metrics.labels import encode_labels
from unstuck.store.contract import Ledger
from unstuck.store.records import Fleet, QueueRecord
from unstuck.version import VERSION

FRESH_S = 1.0
"""Scrapes that come sooner after another share its answer."""
WORKER_STATES = ("active", "draining", "suspect", "dead", "stopped")


class Meter:
    """One per door: many may scrape at once, and the ledger is asked once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._text = ""
        self._read_s = -math.inf

    def text(self, ledger: Ledger) -> str:
        """Give the metrics of a ledger; whoever comes while they are read waits for that answer."""
        with self._lock:
            if time.monotonic() - self._read_s >= FRESH_S:
                self._text = measure(ledger)
                self._read_s = time.monotonic()
            return self._text


def measure(ledger: Ledger) -> str:
    queues = ledger.queues()
    # What did not happen yet is there as 0: the first time it does is seen as a change.
    counted = {
        (catalogue.JOBS_ENDED.name, encode_labels({"queue": queue.name, "state": state})): 0.0
        for queue in queues
        for state in sorted(FINAL)
    }
    counted |= {(count.name, count.labels): count.value for count in ledger.counters()}
    return expose(counted, gauges(queues, ledger.fleet()))


def gauges(queues: list[QueueRecord], fleet: Fleet) -> list[tuple[Gauge, Readings]]:
    """Say in numbers how queues and workers stand."""
    unswept_s = math.inf if fleet.unswept_s is None else fleet.unswept_s
    return [
        (catalogue.JOBS, [reading for queue in queues for reading in _jobs(queue)]),
        (catalogue.OLDEST_PENDING, [({"queue": queue.name}, queue.oldest_pending_s or 0.0) for queue in queues]),
        (catalogue.QUEUE_PAUSED, [({"queue": queue.name}, float(queue.paused)) for queue in queues]),
        (catalogue.QUEUE_WORKERS, [({"queue": queue.name}, queue.workers) for queue in queues]),
        (catalogue.WORKERS, [({"state": state}, fleet.workers.get(state, 0)) for state in WORKER_STATES]),
        (catalogue.WORKERS_LATE, [({}, fleet.late)]),
        (catalogue.WORKER_SILENCE, [({}, fleet.silent_s)]),
        (catalogue.SWEEP_OVERDUE, [({}, unswept_s)]),
        (catalogue.BUILD, [({"version": VERSION}, 1)]),
    ]


def _jobs(queue: QueueRecord) -> Readings:
    counts = {
        "pending": queue.pending,
        "scheduled": queue.scheduled,
        "claimed": queue.claimed,
        "running": queue.running,
        "waiting": queue.waiting,
        "blocked": queue.blocked,
    }
    return [({"queue": queue.name, "state": state}, count) for state, count in counts.items()]
