"""Replace the reaper's hands on real processes by hands on simulated ones: kill, look at marks, forget."""

from collections.abc import Collection
from typing import TYPE_CHECKING

from unstuck.reaper import scene, shared_memory
from unstuck.reaper.scene import Scene

if TYPE_CHECKING:
    from tests.simulation.world import World

_world: list["World"] = []


def look_into(world: "World") -> None:
    """Let the product's reaper see the processes of this world."""
    _world[:] = [world]
    scene.clear = _clear
    scene.kill_attempts = _kill_attempts
    scene.forget = _forget
    shared_memory.remove_leftovers = _remove_leftovers


def _clear(trace: str, *, nursery: bool = True, within_s: float = 1.0) -> Scene:
    """Kill the family of a dead worker, and read which of its jobs had begun."""
    life = _world[0].lives[trace]
    if life.id != trace and life.process.alive:
        # It goes on under a new id, and what it runs now is not of the dead.
        return Scene()
    entered = frozenset(life.entered)
    if nursery:
        life.end_family()
    else:
        for runner in list(life.given.values()):
            runner.dies()
    return Scene(True, entered)


def _kill_attempts(trace: str, tokens: Collection[int]) -> int:
    life = _world[0].lives[trace]
    found = [runner for token, runner in life.given.items() if token in tokens]
    for runner in found:
        runner.dies()
    return len(found)


def _remove_leftovers(ledger: object) -> int:
    """Leave the shared memory of real workers alone."""
    return 0


def _forget(trace: str) -> None:
    """Leave nothing behind: there is nothing."""
