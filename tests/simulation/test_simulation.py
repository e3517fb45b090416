"""Play fleets under faults drawn from their seeds, and every scenario that once failed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SEEDS = 100
MANY_SEEDS = 1_000
POSTGRES_SEEDS = 8


def simulate(*arguments: str) -> str:
    """Run the simulation in a process of its own: it replaces the clocks of Python."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulation", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_hundred_fleets_keep_every_promise() -> None:
    assert f"{SEEDS} seeds on sqlite" in simulate("--seeds", str(SEEDS))


@pytest.mark.long
def test_a_thousand_fleets_keep_every_promise() -> None:
    assert f"{MANY_SEEDS} seeds on sqlite" in simulate("--seeds", str(MANY_SEEDS))


@pytest.mark.long
def test_fleets_on_postgresql_keep_every_promise() -> None:
    assert f"{POSTGRES_SEEDS} seeds on postgresql" in simulate("--seeds", str(POSTGRES_SEEDS), "--ledger", "postgresql")


def test_scenarios_that_once_failed_hold() -> None:
    assert "holds" in simulate("--kept")


@pytest.mark.parametrize("number", ["3", pytest.param("7", marks=pytest.mark.long)])
def test_a_seed_plays_the_same_way_every_time(number: str) -> None:
    first, second = simulate("--seed", number, "-v"), simulate("--seed", number, "-v")
    assert first == second
    assert re.search(r"begins job \d+", first)
