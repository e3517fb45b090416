"""A shop on SQLite for every test, and on PostgreSQL for those that ask."""

from pathlib import Path

import pytest
from tests.acceptance.shop import Shop


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    """A folder with no ledger in it yet."""
    return Shop(f"sqlite:///{tmp_path}/jobs.db", tmp_path)


@pytest.fixture(params=["sqlite", "postgres"])
def either_shop(request: pytest.FixtureRequest, tmp_path: Path) -> Shop:
    if request.param == "sqlite":
        return Shop(f"sqlite:///{tmp_path}/jobs.db", tmp_path)
    return Shop(request.getfixturevalue("pg_url"), tmp_path)
