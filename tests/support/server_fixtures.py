"""A shop on SQLite for every test, and on PostgreSQL for those that ask; doors and browsers for all tests of a file."""

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser
from tests.support import http_server
from tests.support.backdoor import Backdoor, backdoor_of
from tests.support.browser import browsing
from tests.support.cli import Cli
from tests.support.http_server import ApiClient, Served, serve, serving
from tests.support.postgres import PgServer
from tests.support.sqlite import ready_sqlite

from unstuck.ledger.contract import Ledger

NO_REAPER = {"UNSTUCK_HTTP_REAP": "false"}


@pytest.fixture
def shop(tmp_path: Path) -> Cli:
    """A folder with no ledger in it yet."""
    return Cli(f"sqlite:///{tmp_path}/jobs.db", tmp_path)


@pytest.fixture(params=["sqlite", "postgres"])
def either_shop(request: pytest.FixtureRequest, tmp_path: Path) -> Cli:
    """One whose tables are there, unless the test wants to see them made."""
    untouched = "untouched" in request.fixturenames
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/jobs.db" if untouched else ready_sqlite(tmp_path)
    else:
        url = request.getfixturevalue("pg_url" if untouched else "ready_pg_url")
    return Cli(url, tmp_path)


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def door(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiClient]:
    """An HTTP server that is open for all tests of a file, on each database; they share its ledger."""
    folder = tmp_path_factory.mktemp("door")
    if request.param == "sqlite":
        url = f"sqlite:///{folder}/jobs.db"
    else:
        server: PgServer = request.getfixturevalue("pg_server")
        url = server.new_ledger()
    shop = Cli(url, folder)
    # Its workers are only written down: a reaper would soon find that they are silent.
    with serving(url, env=NO_REAPER) as client:
        shop.worker()
        yield ApiClient(shop, client)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as browser:
        yield browser


@pytest.fixture(scope="module")
def stand(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Cli:
    """One ledger for all tests of a file, with a worker for those queues that the file names."""
    folder = tmp_path_factory.mktemp("shop")
    shop = Cli(f"sqlite:///{folder}/jobs.db", folder)
    shop.worker(queues=getattr(request.module, "QUEUES", ("default",)))
    return shop


@pytest.fixture(scope="module")
def served(stand: Cli) -> Iterator[Served]:
    """The HTTP server of that ledger."""
    with serve(stand.url, env=NO_REAPER) as served:
        yield served


# Workers over HTTP ----------------------------------------------------------------------------


@pytest.fixture(params=http_server.DATABASES, scope="module")
def ledger_url(request: pytest.FixtureRequest) -> Iterator[str]:
    with http_server.empty_database(request) as url:
        yield url


@pytest.fixture(scope="module")
def open_door(ledger_url: str) -> Iterator[tuple[Served, Ledger]]:
    """An HTTP server for workers over HTTP, for all tests of a file, and the ledger behind it."""
    with http_server.door(ledger_url) as made:
        yield made


@pytest.fixture
def backdoor(ledger_url: str) -> Backdoor:
    return backdoor_of(ledger_url)


@pytest.fixture
def http(open_door: tuple[Served, Ledger]) -> httpx.Client:
    return open_door[0].client


@pytest.fixture
def ledger(open_door: tuple[Served, Ledger]) -> Ledger:
    return open_door[1]


@pytest.fixture
def queue(request: pytest.FixtureRequest) -> str:
    """Every test has a queue of its own."""
    return re.sub(r"\W+", "-", request.node.name).strip("-")
