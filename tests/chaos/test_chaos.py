"""The short forms of the chaos runs; `make chaos` has the long ones."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.chaos import disasters
from tests.chaos.__main__ import run_chaos
from tests.chaos.disasters import DisasterScene, play
from tests.support.hosts import needs_own_mounts
from tests.support.postgres_cluster import needs_pgbouncer

ROOT = Path(__file__).resolve().parents[2]


def test_random_kills_lose_nothing(url: str, tmp_path: Path, seed: int) -> None:
    states = run_chaos(url, tmp_path, workers=4, jobs=2_000, seconds=8, seed=seed)
    assert sum(states.values()) == 2_000


@pytest.fixture(scope="module")
def postgres_scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DisasterScene]:
    with disasters.on_postgres(tmp_path_factory.mktemp("scene")) as scene:
        yield scene


PATIENCE_S = 240.0
SHOWN_ELSEWHERE = (
    disasters.hang,
    disasters.sessions_cut,
    disasters.road_cut,
    disasters.roads_broken,
    disasters.roads_slow,
    disasters.open_transactions,
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


@pytest.mark.long
@pytest.mark.parametrize("disaster", disasters.CLOCK)
def test_a_clock_of_the_server_that_is_set_kills_nobody(
    tmp_path: Path, disaster: Callable[[DisasterScene], None]
) -> None:
    with disasters.on_postgres_with_clock(tmp_path) as scene:
        play(scene, disaster)


@needs_pgbouncer
def test_a_pooler_that_restarts_kills_nobody(tmp_path: Path) -> None:
    with disasters.behind_pooler(tmp_path) as scene:
        play(scene, disasters.pooler_restarts)


@needs_own_mounts
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_full_disk_kills_nobody(kind: str) -> None:
    short = ("--times", "1", "--lasting", "1")
    command = [sys.executable, "-m", "tests.chaos.__main__", "--url", kind, "--scenario", "disk_full", *short]
    played = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert played.returncode == 0, played.stdout + played.stderr
    assert f"disk_full on {kind}: " in played.stdout
