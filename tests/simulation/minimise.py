"""Make a failing scenario smaller for as long as it still fails in the same way."""

from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec
from tests.simulation.scenario import Scenario

MAX_TRIES = 300

T = TypeVar("T")

Fails = Callable[[Scenario], bool]


def minimise(scenario: Scenario, fails: Fails) -> Scenario:
    """Return the smallest scenario that was found: fewer faults, jobs and workers, plainer settings."""
    tries = 0
    again = True
    while again and tries < MAX_TRIES:
        again = False
        for smaller in _smaller(scenario):
            tries += 1
            if fails(smaller):
                scenario, again = smaller, True
                break
            if tries >= MAX_TRIES:
                break
    return scenario


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    for number in range(len(scenario.faults)):
        yield _with(scenario, faults=_without(scenario.faults, number))
    for number in range(len(scenario.jobs)):
        yield _with(scenario, jobs=_without(scenario.jobs, number))
    if len(scenario.workers) > 1:
        for number in range(len(scenario.workers)):
            yield _with(scenario, workers=_without(scenario.workers, number))
    plain: dict[str, object] = {
        "schedule_every_s": None,
        "claimed_stale_after_s": None,
        "running_stale_after_s": None,
        "containers": False,
        "pooled": False,
        "late_share": 0.0,
        "auto_requeue": True,
        "auto_fail": True,
        "reapers": 0,
        "evidence": (),
    }
    for name, value in plain.items():
        if getattr(scenario, name) != value:
            yield _with(scenario, **{name: value})


def _with(scenario: Scenario, **changes: object) -> Scenario:
    return msgspec.structs.replace(scenario, **changes)


def _without(items: tuple[T, ...], number: int) -> tuple[T, ...]:
    return items[:number] + items[number + 1 :]
