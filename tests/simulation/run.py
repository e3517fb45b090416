"""Run one scenario, or the scenario of one seed, and say what came of it."""

import random
from collections import Counter
from dataclasses import dataclass, field

from tests.simulation.clock import stand_on
from tests.simulation.history import Violation
from tests.simulation.scenario import Scenario, draw
from tests.simulation.storage import SqliteStorage
from tests.simulation.world import World


LEDGERS = ("sqlite", "rules", "postgresql")


@dataclass
class Result:
    scenario: Scenario
    violations: list[Violation]
    story: list[str]
    verdicts: Counter[str] = field(default_factory=Counter)
    events: int = 0
    """How many steps it took."""


def run_seed(seed: int, ledger: str = "sqlite") -> Result:
    return run_scenario(draw(seed), ledger)


def run_scenario(scenario: Scenario, ledger: str = "sqlite") -> Result:
    """Play it; the same scenario always plays the same way."""
    story: list[str] = []
    storage = SqliteStorage(scenario.recovery())
    world = World(scenario, storage, lambda at_s, what: story.append(f"{at_s:9.3f}s  {what}"))
    # The product draws too: pauses, delays of retries.
    random.seed(scenario.seed)
    try:
        with stand_on(world.server.machine):
            try:
                world.run()
            except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to this seed
                world.history.violate("nothing fails by surprise", f"{type(error).__name__}: {error}")
                world.error = error
    finally:
        world.close()
        storage.close()
    return Result(scenario, world.history.violations, story, world.history.verdicts, world.hub.events)
