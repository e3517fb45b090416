"""A screen, and ledgers of each kind. These tests run in a process of their own: see `tests/conftest.py`."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.desktop.screen import Screen
from tests.mdp.broker import BrokerHarness
from tests.support.cli import Cli


@pytest.fixture
def screen() -> Iterator[Screen]:
    """Qt in this process, with nothing on the screen before and after."""
    screen = Screen()
    screen.clear()
    yield screen
    screen.clear()


@pytest.fixture
def shop(tmp_path: Path) -> Cli:
    return Cli(f"sqlite:///{tmp_path}/jobs.db", tmp_path)


@pytest.fixture(params=["sqlite", "postgresql"])
def either_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return (
        f"sqlite:///{tmp_path}/jobs.db" if request.param == "sqlite" else str(request.getfixturevalue("ready_pg_url"))
    )


@pytest.fixture
def either_shop(either_url: str, tmp_path: Path) -> Cli:
    return Cli(either_url, tmp_path)


@pytest.fixture
def scene(either_url: str, tmp_path: Path) -> Iterator[BrokerHarness]:
    """A broker of ours."""
    made = BrokerHarness(either_url, tmp_path)
    try:
        yield made
    finally:
        made.close()
