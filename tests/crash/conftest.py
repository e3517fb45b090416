"""Fixtures of the crash tests: a ledger of each kind and a fleet of real workers on it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fleet import Fleet

MakeFleet = Callable[..., Fleet]


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of an empty ledger: each test that asks runs on both databases."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/jobs.db"
    return str(request.getfixturevalue("pg_url"))


@pytest.fixture
def make_fleet(url: str, tmp_path: Path) -> Iterator[MakeFleet]:
    """Make fleets with settings of their own; all their processes end with the test."""
    made: list[Fleet] = []

    def make(**settings: Any) -> Fleet:
        made.append(Fleet(settings.pop("url", url), tmp_path, **settings))
        return made[-1]

    yield make
    for fleet in made:
        fleet.close()


@pytest.fixture
def fleet(make_fleet: MakeFleet) -> Fleet:
    """A fleet with default settings."""
    return make_fleet()
