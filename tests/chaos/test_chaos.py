"""The short forms of the chaos runs; `make chaos` has the long ones."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.chaos import disasters
from tests.chaos.__main__ import run_chaos
from tests.chaos.disasters import DisasterScene, play
from tests.support.postgres_cluster import needs_pgbouncer

needs_small_disk = pytest.mark.skipif(not disasters.can_mount(), reason="may not mount a small file system (root)")


def test_random_kills_lose_nothing(url: str, tmp_path: Path, seed: int) -> None:
    states = run_chaos(url, tmp_path, workers=4, jobs=2_000, seconds=8, seed=seed)
    assert sum(states.values()) == 2_000


@pytest.fixture(scope="module")
def postgres_scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DisasterScene]:
    with disasters.on_postgres(tmp_path_factory.mktemp("scene")) as scene:
        yield scene


SHOWN_ELSEWHERE = (
    disasters.hang,
    disasters.sessions_cut,
    disasters.road_cut,
    disasters.roads_broken,
    disasters.roads_slow,
    disasters.open_transactions,
    disasters.clock_forward,
    disasters.clock_back,
)
"""Other tests of the suite show the same in less time."""


@pytest.mark.parametrize(
    "disaster",
    [
        pytest.param(one, id=one.__name__, marks=[pytest.mark.long] if one in SHOWN_ELSEWHERE else [])
        for one in disasters.SERVER
    ],
)
def test_trouble_of_the_server_kills_nobody(
    postgres_scene: DisasterScene, disaster: Callable[[DisasterScene], None]
) -> None:
    play(postgres_scene, disaster)


@needs_pgbouncer
def test_a_pooler_that_restarts_kills_nobody(tmp_path: Path) -> None:
    with disasters.behind_pooler(tmp_path) as scene:
        play(scene, disasters.pooler_restarts)


@needs_small_disk
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_full_disk_kills_nobody(tmp_path: Path, kind: str) -> None:
    with disasters.on_small_disk(tmp_path, kind) as scene:
        play(scene, disasters.disk_full)
