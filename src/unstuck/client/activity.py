"""Say what happened minute by minute, for charts: jobs that ended, how long they waited and ran, deaths."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from unstuck.metrics.catalogue import DEATHS, JOB_RUN, JOB_WAIT, JOBS_ENDED, LE, Histogram
from unstuck.metrics.labels import decode_labels
from unstuck.store.records import MinuteCount

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
