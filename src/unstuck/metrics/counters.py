"""Count in this process, by name and labels."""

import math
import threading
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from unstuck.metrics.catalogue import LE, Counter, Histogram

_decoder = msgspec.json.Decoder(dict[str, str])
_encoder = msgspec.json.Encoder(order="sorted")


def encode_labels(labels: Mapping[str, str]) -> str:
    return _encoder.encode(labels).decode()


def decode_labels(text: str) -> dict[str, str]:
    return _decoder.decode(text)


MAX_SERIES = 1_000
"""How many combinations of labels one metric may have in one process; what comes then is counted as `OTHER`."""
OTHER = "(other)"
NAMED_BY_USERS = frozenset({"queue", "task"})
"""Labels that may have any number of values."""

Labels = tuple[str, ...]
Counted = Mapping[tuple[str, str], float]
"""By name and labels, as the ledger keeps it."""


class HistogramSeries:
    """The buckets of one histogram with one set of labels, and the sum of all that fell into them."""

    __slots__ = ("bounds", "buckets", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.buckets = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Not locked: for a series that only one thread adds to."""
        self.buckets[bisect_left(self.bounds, value)] += 1
        self.sum += value


@dataclass(frozen=True)
class Snapshot:
    """What was tallied up to a moment, or between two."""

    totals: Counted = field(default_factory=dict)
    per_minute_labels: Counted = field(default_factory=dict)
    """The same by fewer labels, for what is kept minute by minute."""

    def since(self, before: "Snapshot") -> "Snapshot":
        return Snapshot(_grown(self.totals, before.totals), _grown(self.per_minute_labels, before.per_minute_labels))

    def plus(self, more: "Snapshot") -> "Snapshot":
        return Snapshot(_sum(self.totals, more.totals), _sum(self.per_minute_labels, more.per_minute_labels))


class Counters:
    """What one process counted since it began. May be added to by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, dict[Labels, float]] = {}
        self._spreads: dict[str, dict[Labels, HistogramSeries]] = {}
        self._metrics: dict[str, Counter | Histogram] = {}

    def add(self, counter: Counter, labels: Labels = (), by: float = 1.0) -> None:
        with self._lock:
            series = self._counts.get(counter.name)
            if series is None:
                series = self._counts[counter.name] = {}
                self._metrics[counter.name] = counter
            if labels not in series:
                labels = _bounded(counter, labels, len(series))
            series[labels] = series.get(labels, 0.0) + by

    def observe(self, histogram: Histogram, value: float, labels: Labels = ()) -> None:
        spread = self.spread(histogram, labels)
        with self._lock:
            spread.observe(value)

    def spread(self, histogram: Histogram, labels: Labels = ()) -> HistogramSeries:
        """Give one series to add to without a lock; only one thread may."""
        with self._lock:
            series = self._spreads.get(histogram.name)
            if series is None:
                series = self._spreads[histogram.name] = {}
                self._metrics[histogram.name] = histogram
            found = series.get(labels)
            if found is None:
                labels = _bounded(histogram, labels, len(series))
                found = series.get(labels) or HistogramSeries(histogram.bounds)
                series[labels] = found
            return found

    def snapshot(self) -> Snapshot:
        """Give all that was counted so far."""
        with self._lock:
            counts = {name: dict(series) for name, series in self._counts.items()}
            spreads = {
                name: {labels: (spread.buckets[:], spread.sum) for labels, spread in series.items()}
                for name, series in self._spreads.items()
            }
            metrics = dict(self._metrics)
        totals: dict[tuple[str, str], float] = {}
        lately: dict[tuple[str, str], float] = {}
        for name, series in counts.items():
            for labels, value in series.items():
                _put(totals, lately, metrics[name], name, labels, value)
        for name, spreading in spreads.items():
            metric = metrics[name]
            assert isinstance(metric, Histogram)
            bounds = [*map(bound_text, metric.bounds), bound_text(math.inf)]
            for labels, (buckets, total) in spreading.items():
                for bound, value in zip(bounds, buckets, strict=True):
                    if value:
                        _put(totals, lately, metric, name, labels, value, le=bound)
                if any(buckets):
                    _put(totals, lately, metric, metric.sum_name, labels, total)
        return Snapshot(totals, lately)


def bound_text(bound: float) -> str:
    """Write the bound of a bucket as Prometheus does."""
    return "+Inf" if math.isinf(bound) else f"{bound:g}"


def _put(
    totals: dict[tuple[str, str], float],
    lately: dict[tuple[str, str], float],
    metric: Counter | Histogram,
    name: str,
    labels: Labels,
    value: float,
    le: str | None = None,
) -> None:
    named = dict(zip(metric.labels, labels, strict=True))
    bucket = {} if le is None else {LE: le}
    totals[name, encode_labels(named | bucket)] = value
    if metric.per_minute_labels is not None:
        key = name, encode_labels({label: named[label] for label in metric.per_minute_labels} | bucket)
        lately[key] = lately.get(key, 0.0) + value


def _bounded(metric: Counter | Histogram, labels: Labels, known: int) -> Labels:
    if known < MAX_SERIES:
        return labels
    return tuple(OTHER if name in NAMED_BY_USERS else value for name, value in zip(metric.labels, labels, strict=True))


def _grown(now: Counted, before: Counted) -> Counted:
    changes = {key: value - before.get(key, 0.0) for key, value in now.items()}
    return {key: change for key, change in changes.items() if change}


def _sum(one: Counted, other: Counted) -> Counted:
    return {**one, **{key: one.get(key, 0.0) + value for key, value in other.items()}}
