"""Fixtures for every test: a PostgreSQL server of our own, started when the first test asks for it."""

from collections.abc import Iterator

import pytest
from tests.pg import PgServer, start_postgres

from unstuck.config import Settings
from unstuck.store.postgres.ledger import PostgresLedger


@pytest.fixture(scope="session")
def pg_server() -> Iterator[PgServer]:
    """One server per test process; tests that stop it must start it again."""
    with start_postgres() as server:
        yield server


@pytest.fixture
def pg_url(pg_server: PgServer) -> Iterator[str]:
    """The address of a fresh, empty database."""
    url = pg_server.new_database()
    yield url
    pg_server.drop_database(url)


@pytest.fixture
def pg_ledger(pg_url: str) -> Iterator[PostgresLedger]:
    """A ledger on PostgreSQL with its tables and nothing in them."""
    ledger = PostgresLedger(Settings(url=pg_url))
    ledger.migrate()
    yield ledger
    ledger.close()
