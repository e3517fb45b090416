"""Write metrics as the text that Prometheus reads, format 0.0.4."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from unstuck.metrics.catalogue import LE, TALLIED, Counter, Gauge, Histogram
from unstuck.metrics.counters import Counted, bound_text, decode_labels

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Readings = Sequence[tuple[Mapping[str, str], float]]
"""The values of a gauge, each with its labels."""


def expose(counted: Counted, gauges: Iterable[tuple[Gauge, Readings]] = ()) -> str:
    """Give the whole text; what is not in our catalogue (counted by a newer version) is left out."""
    series: dict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
    for (name, labels), value in counted.items():
        series[name].append((decode_labels(labels), value))
    lines: list[str] = []
    for gauge, readings in gauges:
        lines += _head(gauge.name, "gauge", gauge.help)
        lines += [_sample(gauge.name, labels, value) for labels, value in readings]
    for metric in TALLIED:
        name = metric.name
        if isinstance(metric, Counter):
            lines += _head(name, "counter", metric.help)
            lines += [_sample(name, labels, value) for labels, value in series[metric.name] or _zero(metric)]
        else:
            lines += _head(name, "histogram", metric.help)
            lines += _histogram(name, metric, series[metric.name], series[metric.sum_name])
    return "\n".join(lines) + "\n"


def _histogram(
    name: str,
    metric: Histogram,
    buckets: Sequence[tuple[dict[str, str], float]],
    sums: Sequence[tuple[dict[str, str], float]],
) -> Iterator[str]:
    by_labels: dict[tuple[str, ...], dict[str, float]] = {} if metric.labels else {(): {}}
    for labels, value in buckets:
        key = tuple(labels.get(label, "") for label in metric.labels)
        by_labels.setdefault(key, {})[labels.get(LE, "")] = value
    total = {tuple(labels.get(label, "") for label in metric.labels): value for labels, value in sums}
    for key, counts in sorted(by_labels.items()):
        labels = dict(zip(metric.labels, key, strict=True))
        below = 0.0
        for bound in (*metric.bounds, math.inf):
            # The ledger keeps what fell into each bucket; Prometheus wants what fell into it and all below.
            below += counts.get(bound_text(bound), 0.0)
            yield _sample(f"{name}_bucket", {**labels, LE: bound_text(bound)}, below)
        yield _sample(f"{name}_sum", labels, total.get(key, 0.0))
        yield _sample(f"{name}_count", labels, below)


def _zero(metric: Counter) -> Readings:
    """A counter without labels is there from the start, so that its first increase is seen as one."""
    return () if metric.labels else (({}, 0.0),)


def _head(name: str, kind: str, help: str) -> list[str]:
    return [f"# HELP {name} {help.replace(chr(92), chr(92) * 2)}", f"# TYPE {name} {kind}"]


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    inside = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
    return f"{name}{{{inside}}} {_number(value)}" if inside else f"{name} {_number(value)}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(float(value))
