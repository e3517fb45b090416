"""The parts of the benchmark by name, each in three sizes: for figures, for a first look, and for the tests."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from bench import (
    detection,
    enqueue,
    http_heartbeats,
    idle_workers,
    latency,
    machine,
    majordomo,
    remote_workers,
    retention,
    runner_wire,
    stale_check,
    table_size,
    throughput,
    watch_cost,
    workflows,
)
from bench.databases import Database
from bench.report import Table

T = TypeVar("T")


@dataclass(frozen=True)
class Size:
    """How much a part measures: 0 for figures, 1 for a first look, 2 to see that it works."""

    number: int

    def of(self, full: T, quick: T, tiny: T) -> T:
        return (full, quick, tiny)[self.number]


FULL, QUICK, TINY = Size(0), Size(1), Size(2)

Part = Callable[[list[Database], Size], Table]

SHAPES: throughput.Shapes = (("async", 200), ("sync", 2), ("sync", 8), ("sync", 32))

CORE: dict[str, Part] = {
    "machine": lambda on, size: machine.run(on, size.of(2.0, 0.5, 0.02)),
    "enqueue": lambda on, size: enqueue.run(on, size.of(2.0, 0.5, 0.02)),
    "latency": lambda on, size: latency.run(on, size.of(200, 20, 2)),
    "throughput": lambda on, size: throughput.run(
        on,
        size.of(3.0, 0.7, 0.01),
        size.of(SHAPES, (SHAPES[0], SHAPES[2]), (SHAPES[1],)),
        size.of((1, 2), (1,), (1,)),
    ),
    "detection": lambda on, size: detection.run(on, size.of(7, 2, 1)),
    "watch-cost": lambda on, size: watch_cost.run(
        on, size.of((2, 8, 32), (8,), (2,)), size.of(12.0, 3.0, 0.1), size.of(20, 3, 1)
    ),
    "workflows": lambda on, size: workflows.run(on, size.of(3.0, 0.5, 0.01), size.of(5, 2, 1)),
    "table-size": lambda on, size: table_size.run(on, size.of(1_000_000, 100_000, 200), size.of(10_000, 5_000, 400)),
    "retention": lambda on, size: retention.run(on, size.of(200_000, 20_000, 500), size.of(3.0, 0.5, 0.01)),
    "idle-workers": lambda on, size: idle_workers.run(
        on, size.of(20, 4, 2), size.of(60.0, 8.0, 0.5), size.of(20.0, 3.0, 0.0)
    ),
}
HTTP: dict[str, Part] = {
    "http-heartbeats": lambda on, size: http_heartbeats.run(on, size.of(1_000, 1_000, 60), size.of(60.0, 6.0, 4.0)),
    "remote-workers": lambda on, size: remote_workers.run(on, size.of(15.0, 1.0, 0.01), size.of(200, 200, 2)),
    "stale-check": lambda on, size: stale_check.run(
        on, size.of(10_000, 2_000, 20), size.of(1_000, 200, 2), size.of(1_000_000, 100_000, 100), size.of(20, 5, 1)
    ),
}
MAJORDOMO: dict[str, Part] = {
    "majordomo-round-trips": lambda on, size: majordomo.round_trips(on, size.of(5.0, 0.5, 0.01)),
    "majordomo-deaths": lambda on, size: majordomo.deaths(on, size.of(10, 2, 1)),
}
RUNNER: dict[str, Part] = {
    "runner-wire": lambda on, size: runner_wire.run(size.of(2.0, 0.5, 0.01), size.of(30, 10, 1)),
}
GROUPS = {"core": CORE, "http": HTTP, "majordomo": MAJORDOMO}
PARTS: dict[str, Part] = CORE | HTTP | MAJORDOMO | RUNNER


def named(words: str) -> list[str]:
    """Return the names of parts in a list such as `machine,http`. Raise ValueError for a word that is no name."""
    names: dict[str, None] = {}
    for word in filter(None, (word.strip() for word in words.split(","))):
        if word not in PARTS and word not in GROUPS:
            raise ValueError(f"{word!r} is not one of {', '.join((*GROUPS, *PARTS))}")
        names |= dict.fromkeys(GROUPS.get(word, [word]))
    if not names:
        raise ValueError("name at least one part")
    return list(names)
