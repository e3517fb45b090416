"""Prometheus text and series per minute, from the gauges and counters of the ledger.

Bounded in cost, however many jobs there are: unfinished jobs are counted by their own small indexes, finished ones were
counted when they ended.
"""

import math
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from unstuck.domain.states import FINAL_STATES
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.admin import MinuteCount
from unstuck.ledger.contract.queues import QueueRecord
from unstuck.ledger.contract.workers import Fleet
from unstuck.metrics import catalogue
from unstuck.metrics.catalogue import DEATHS, JOB_RUN, JOB_WAIT, JOBS_ENDED, LE, Gauge, Histogram
from unstuck.metrics.counters import decode_labels, encode_labels
from unstuck.metrics.prometheus import Readings, expose
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
    queues = ledger.queues.list()
    # What did not happen yet is there as 0: the first time it does is seen as a change.
    counted = {
        (catalogue.JOBS_ENDED.name, encode_labels({"queue": queue.name, "state": state})): 0.0
        for queue in queues
        for state in sorted(FINAL_STATES)
    }
    counted |= {(count.name, count.labels): count.value for count in ledger.admin.counters()}
    return expose(counted, gauges(queues, ledger.workers.fleet()))


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


MAX_MINUTES = 24 * 60
SERIES = (JOBS_ENDED.name, JOB_WAIT.name, JOB_RUN.name, DEATHS.name)


class Minute(msgspec.Struct, frozen=True):
    at: float
    """When it began, in seconds since 1970."""
    ended: dict[str, int]
    """Jobs that ended, by final state; states that did not occur are left out."""
    ended_by_queue: dict[str, int]
    deaths: dict[str, int]
    """By cause, of runners and workers together."""
    wait_p50_s: float | None = None
    """Estimated from buckets, as Prometheus does; None where nothing was counted."""
    wait_p95_s: float | None = None
    run_p50_s: float | None = None
    run_p95_s: float | None = None


def activity(counts: Iterable[MinuteCount], since_minute: int, until_minute: int) -> list[Minute]:
    """Give every minute from `since_minute` until before `until_minute`, those in which nothing happened too."""
    by_minute: dict[int, list[MinuteCount]] = defaultdict(list)
    for count in counts:
        by_minute[count.minute].append(count)
    return [_minute(number, by_minute.get(number, [])) for number in range(since_minute, until_minute)]


def _minute(number: int, counts: Sequence[MinuteCount]) -> Minute:
    waits, runs = _buckets(counts, JOB_WAIT), _buckets(counts, JOB_RUN)
    return Minute(
        at=number * 60.0,
        ended=_by_label(counts, JOBS_ENDED.name, "state"),
        ended_by_queue=_by_label(counts, JOBS_ENDED.name, "queue"),
        deaths=_by_label(counts, DEATHS.name, "cause"),
        wait_p50_s=quantile(waits, 0.5),
        wait_p95_s=quantile(waits, 0.95),
        run_p50_s=quantile(runs, 0.5),
        run_p95_s=quantile(runs, 0.95),
    )


def quantile(buckets: Mapping[float, float], share: float) -> float | None:
    """Estimate a quantile from how many fell under each upper bound (not cumulative), evenly spread in each bucket."""
    total = sum(buckets.values())
    if total <= 0:
        return None
    wanted, below, lower = share * total, 0.0, 0.0
    for bound in sorted(buckets):
        here = buckets[bound]
        if here and below + here >= wanted:
            # Nothing is known beyond the last bound.
            return lower if math.isinf(bound) else lower + (bound - lower) * (wanted - below) / here
        below += here
        lower = bound if not math.isinf(bound) else lower
    return lower


def _buckets(counts: Sequence[MinuteCount], histogram: Histogram) -> dict[float, float]:
    # Every bound is there, so that each bucket knows where the one below it ends.
    buckets = dict.fromkeys((*histogram.bounds, math.inf), 0.0)
    for count in counts:
        if count.name == histogram.name:
            bound = float(decode_labels(count.labels)[LE])
            buckets[bound] = buckets.get(bound, 0.0) + count.value
    return buckets


def _by_label(counts: Sequence[MinuteCount], name: str, label: str) -> dict[str, int]:
    found: dict[str, float] = defaultdict(float)
    for count in counts:
        if count.name == name:
            found[decode_labels(count.labels).get(label, "")] += count.value
    return {key: round(value) for key, value in found.items()}
