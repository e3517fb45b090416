"""Run one scenario, or the scenario of one seed, and say what came of it."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from tests.simulation.clock import stand_on
from tests.simulation.history import Violation
from tests.simulation.model_ledger import ModelStorage
from tests.simulation.postgres_storage import PostgresStorage
from tests.simulation.scenario import Scenario, draw
from tests.simulation.storage import SqliteStorage
from tests.simulation.world import World

from unstuck.config import Recovery

STORAGES: dict[str, Callable[[Recovery], Any]] = {
    "sqlite": SqliteStorage,
    "rules": ModelStorage,
    "postgresql": PostgresStorage,
}
LEDGERS = tuple(STORAGES)


@dataclass
class Result:
    scenario: Scenario
    violations: list[Violation]
    story: list[str]
    verdicts: Counter[str] = field(default_factory=Counter)
    events: int = 0
    """How many steps it took."""


def run_seed(seed: int, ledger: str = "sqlite") -> Result:
    return run_scenario(draw_for(seed, ledger), ledger)


def draw_for(seed: int, ledger: str) -> Scenario:
    """Draw what this ledger can play."""
    scenario = draw(seed, "server" if ledger == "postgresql" else None)
    # The model knows no schedules.
    return msgspec.structs.replace(scenario, schedule_every_s=None) if ledger == "rules" else scenario


def run_scenario(scenario: Scenario, ledger: str = "sqlite") -> Result:
    """Play it; the same scenario always plays the same way."""
    story: list[str] = []
    storage = STORAGES[ledger](scenario.recovery())
    world = World(scenario, storage, lambda at_s, what: story.append(f"{at_s:9.3f}s  {what}"))
    # The product draws too: pauses, delays of retries.
    random.seed(scenario.seed)
    try:
        with stand_on(world.server.machine):
            try:
                world.run()
            except Exception as error:
                world.history.violate("nothing fails by surprise", f"{type(error).__name__}: {error}")
                world.error = error
    finally:
        world.close()
        storage.close()
    return Result(scenario, world.history.violations, story, world.history.verdicts, world.hub.events)
