"""The short form of the chaos run; `make chaos` is the long one."""

import random
from pathlib import Path

from tests.crash.chaos import run_chaos


def test_random_kills_lose_nothing(url: str, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1_000_000)
    states = run_chaos(url, tmp_path, workers=4, jobs=2_000, seconds=8, seed=seed)
    assert sum(states.values()) == 2_000
