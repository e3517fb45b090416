"""A shop on SQLite for every test, and on PostgreSQL for those that ask; doors and browsers for all tests of a file."""

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser
from tests.acceptance import foreign_kit
from tests.acceptance.browsing import browsing
from tests.acceptance.door import Door
from tests.acceptance.quick import Forker
from tests.acceptance.shop import Shop
from tests.pg import PgServer
from tests.sqlite_model import ready_sqlite
from tests.web import Served, opened, serving

from unstuck.store.contract import Ledger

NO_REAPER = {"UNSTUCK_WEB_REAP": "false"}


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
    """One whose tables are there, unless the test wants to see them made."""
    untouched = "untouched" in request.fixturenames
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/jobs.db" if untouched else ready_sqlite(tmp_path)
    else:
        url = request.getfixturevalue("pg_url" if untouched else "ready_pg_url")
    return Shop(url, tmp_path, forker=forker)


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def door(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, forker: Forker) -> Iterator[Door]:
    """A web door that is open for all tests of a file, on each database; they share its ledger."""
    folder = tmp_path_factory.mktemp("door")
    if request.param == "sqlite":
        url = f"sqlite:///{folder}/jobs.db"
    else:
        server: PgServer = request.getfixturevalue("pg_server")
        url = server.new_ledger()
    shop = Shop(url, folder, forker=forker)
    # Its workers are only written down: a reaper would soon find that they are silent.
    with serving(url, env=NO_REAPER) as client:
        shop.worker()
        yield Door(shop, client)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as browser:
        yield browser


@pytest.fixture(scope="module")
def stand(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Shop:
    """One ledger for all tests of a file, with a worker for those queues that the file names."""
    folder = tmp_path_factory.mktemp("shop")
    shop = Shop(f"sqlite:///{folder}/jobs.db", folder)
    shop.worker(queues=getattr(request.module, "QUEUES", ("default",)))
    return shop


@pytest.fixture(scope="module")
def served(stand: Shop) -> Iterator[Served]:
    """The web door of that ledger."""
    with opened(stand.url, env=NO_REAPER) as served:
        yield served


# Workers over HTTP ----------------------------------------------------------------------------


@pytest.fixture(params=foreign_kit.DATABASES, scope="module")
def open_door(request: pytest.FixtureRequest) -> Iterator[tuple[Served, Ledger]]:
    """A web door for workers over HTTP, for all tests of a file, and the ledger behind it."""
    with foreign_kit.empty_database(request) as url, foreign_kit.door(url) as made:
        yield made


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
