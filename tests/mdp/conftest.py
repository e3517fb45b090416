"""Brokers: one of ours on a ledger of each kind, and one that the test plays itself."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.mdp.broker import Broker, BrokerHarness, Peers, Played, played
from tests.support.sqlite import ready_sqlite


@pytest.fixture(params=["sqlite", "postgresql"])
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BrokerHarness]:
    """Each test that asks runs on both databases."""
    sqlite = request.param == "sqlite"
    made = BrokerHarness(ready_sqlite(tmp_path) if sqlite else str(request.getfixturevalue("ready_pg_url")), tmp_path)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def broker() -> Iterator[Played]:
    """One that says what the test has it say; files that need a real one have it under the same name."""
    with played() as broker:
        yield broker


@pytest.fixture
def peers(broker: Broker) -> Iterator[Peers]:
    """Those who talk to the real broker of a file."""
    peers = Peers(broker)
    yield peers
    peers.close()
