"""Fixtures for every test: a PostgreSQL server of our own, started when the first test asks for it."""

from collections.abc import Iterator

import pytest
from tests.pg import PgServer, start_postgres


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
