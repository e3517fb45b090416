"""Fixtures for every test: a PostgreSQL server of our own, started when the first test asks for it."""

import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import hypothesis
import pytest
from tests.pg import PgServer, start_postgres

from unstuck.config import Settings
from unstuck.store.postgres.ledger import PostgresLedger

if TYPE_CHECKING:
    from tests.screen import Screen

# Whoever started us in the background had Ctrl-C ignored, and every process that a test starts would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# A busy machine is no reason to fail, so there is no limit of time. What is found at random is found at home; a build
# that others wait for tries the same cases every time.
hypothesis.settings.register_profile("house", deadline=None, derandomize=os.environ.get("CI") == "true")
hypothesis.settings.load_profile("house")


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


@pytest.fixture
def screen() -> "Iterator[Screen]":
    """Qt in this process, with nothing on the screen before and after."""
    from tests.screen import Screen

    screen = Screen()
    screen.clear()
    yield screen
    screen.clear()
