"""Fixtures for every test: a PostgreSQL server of our own, started when the first test asks for it."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from tests.support import hosts, run_guard
from tests.support.hosts import Host
from tests.support.log_state import LogState
from tests.support.postgres import PgServer, start_postgres
from tests.support.process_logs import pytest_runtest_makereport, pytest_runtest_setup  # noqa: F401 - hooks

from unstuck.config import Settings
from unstuck.ledger.postgres.ledger import PostgresLedger

QT = Path(__file__).parent / "desktop"

# Whoever started us in the background had Ctrl-C ignored, and every process that a test starts would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# A busy machine is no reason to fail, so there is no limit of time. What is found at random is found at home; a build
# that others wait for tries the same cases every time.
hypothesis.settings.register_profile("house", deadline=None, derandomize=os.environ.get("CI") == "true")
hypothesis.settings.load_profile("house")


def pytest_configure() -> None:
    run_guard.start()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Load no Qt into a process that runs other tests, unless told to: their threads may collect garbage of Qt."""
    if collection_path != QT:
        return None
    asked = [(config.invocation_params.dir / word.partition("::")[0]).resolve() for word in config.args]
    return None if all(path.is_relative_to(QT) for path in asked) else True


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown() -> None:
    """Let what a failed test left open count against that test.

    pytest keeps its traceback until the next test runs, and with it every connection that the test did not come to
    close. The warning about them would fail the next test."""
    if hasattr(sys, "last_value"):
        for name in ("last_type", "last_value", "last_traceback", "last_exc"):
            if hasattr(sys, name):
                delattr(sys, name)
        gc.collect()


@pytest.fixture(autouse=True)
def log_state() -> Iterator[None]:
    """Fail a test that changes how the process logs and leaves it so: the next test would miss lines."""
    before = LogState.now()
    yield
    assert LogState.now() == before, "this test changed how the process logs; ask for the fixture restored_logging"


@pytest.fixture
def restored_logging(log_state: None) -> Iterator[None]:
    """Restore what a command or `logs.setup` changes in the process that runs it."""
    before = LogState.now()
    yield
    before.restore()


@pytest.fixture(scope="session")
def other_hosts() -> None:
    if not hosts.can_enter(Host(host="elsewhere")):
        pytest.skip("may not give a process another host name (root, Linux)")


@pytest.fixture(scope="session")
def other_boots() -> None:
    if not hosts.can_enter(Host(boot_id="another")):
        pytest.skip("may not give a process another boot id (root, Linux)")


@pytest.fixture(scope="session")
def own_mounts() -> None:
    if not hosts.can_enter(Host(boot_id="another")):
        pytest.skip("may not give a process mounts of its own (root, Linux)")


@pytest.fixture(scope="session")
def networks() -> None:
    if not hosts.can_make_networks():
        pytest.skip("may not make network namespaces (root, Linux, iproute2)")


@pytest.fixture(scope="session")
def pg_server() -> Iterator[PgServer]:
    """One server per test process; tests that stop it must start it again."""
    with start_postgres() as server:
        yield server


@pytest.fixture
def pg_url(pg_server: PgServer, request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a fresh, empty database; it has the ledger's tables where the ledger is asked for as well."""
    url = pg_server.new_ledger() if "pg_ledger" in request.fixturenames else pg_server.new_database()
    yield url
    pg_server.drop_database(url)


@pytest.fixture
def ready_pg_url(pg_server: PgServer) -> Iterator[str]:
    """The address of a database with the ledger's tables and nothing in them."""
    url = pg_server.acquire()
    yield url
    pg_server.release(url)


@pytest.fixture
def untouched() -> None:
    """Asked for by who wants to see the tables being made, where others find them there."""


@pytest.fixture
def pg_ledger(pg_url: str) -> Iterator[PostgresLedger]:
    """A ledger on PostgreSQL with its tables and nothing in them."""
    ledger = PostgresLedger(Settings(url=pg_url))
    yield ledger
    ledger.close()
