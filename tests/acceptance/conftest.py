"""A shop on SQLite for every test, and on PostgreSQL for those that ask."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.acceptance.quick import Forker
from tests.acceptance.shop import Shop


@pytest.fixture(scope="session")
def forker() -> Iterator[Forker]:
    with Forker() as forker:
        yield forker


@pytest.fixture
def shop(tmp_path: Path, forker: Forker) -> Shop:
    """A folder with no ledger in it yet."""
    return Shop(f"sqlite:///{tmp_path}/jobs.db", tmp_path, forker=forker)


@pytest.fixture(params=["sqlite", "postgres"])
def either_shop(request: pytest.FixtureRequest, tmp_path: Path, forker: Forker) -> Shop:
    if request.param == "sqlite":
        return Shop(f"sqlite:///{tmp_path}/jobs.db", tmp_path, forker=forker)
    return Shop(request.getfixturevalue("pg_url"), tmp_path, forker=forker)
