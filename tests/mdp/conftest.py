"""A broker of ours on a ledger of each kind."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.mdp.scene import Scene


@pytest.fixture(params=["sqlite", "postgresql"])
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scene]:
    """Each test that asks runs on both databases."""
    sqlite = f"sqlite:///{tmp_path}/jobs.db"
    made = Scene(sqlite if request.param == "sqlite" else str(request.getfixturevalue("ready_pg_url")), tmp_path)
    try:
        yield made
    finally:
        made.close()
