"""Fixtures of the conformance suite: every test that asks for `ledger` runs on both databases."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.backdoor import Backdoor, PostgresBackdoor, SqliteBackdoor
from tests.support.builders import birth
from tests.support.postgres import LedgerPool, PgServer
from tests.support.sqlite import ready_sqlite

from unstuck.config import Settings
from unstuck.ledger.contract import Ledger
from unstuck.ledger.open import open_ledger
from unstuck.ledger.postgres import connect

DIALECTS = ("sqlite", "postgresql")
OpenLedger = Callable[[], Ledger]


@pytest.fixture(params=DIALECTS)
def dialect(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def url(dialect: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of an empty database of each kind. Without a PostgreSQL the fixture fails; it never skips."""
    # Making the tables takes longer than most of these tests: those that do not migrate find them there.
    ready = "ledger" in request.fixturenames
    if dialect == "sqlite":
        return ready_sqlite(tmp_path) if ready else f"sqlite:///{tmp_path}/jobs.db"
    return str(request.getfixturevalue("swept_pg_url" if ready else "pg_url"))


@pytest.fixture(scope="session")
def shared_pg_ledger(pg_server: PgServer) -> Iterator[tuple[str, LedgerPool]]:
    """A database with the ledger's tables, made once, and what sweeps it."""
    url = pg_server.new_ledger()
    broom = LedgerPool(url)
    yield url, broom
    broom.close()


@pytest.fixture
def swept_pg_url(shared_pg_ledger: tuple[str, LedgerPool]) -> str:
    """The shared database as it was when its tables were new."""
    url, broom = shared_pg_ledger
    broom.clean()
    return url


@pytest.fixture
def room_for_statements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give statements on PostgreSQL a minute: on a busy machine, large ones take longer than a worker waits."""
    monkeypatch.setattr(connect, "LEAST_STATEMENT_S", 60.0)
    monkeypatch.setattr(connect, "MOST_SERVICE_STATEMENT_S", 60.0)
    monkeypatch.setattr(connect, "LEAST_TURN_ANSWER_S", 90.0)
    monkeypatch.setattr(connect, "MOST_TURN_ANSWER_S", 90.0)


@pytest.fixture
def open_again(url: str, room_for_statements: None) -> Iterator[OpenLedger]:
    """Open one more ledger object on the same database, as another process would."""
    opened: list[Ledger] = []

    def open_one() -> Ledger:
        opened.append(open_ledger(Settings(url=url)))
        return opened[-1]

    yield open_one
    for ledger in opened:
        ledger.close()


@pytest.fixture
def empty_ledger(open_again: OpenLedger) -> Ledger:
    """A ledger whose tables do not exist yet."""
    return open_again()


@pytest.fixture
def ledger(empty_ledger: Ledger) -> Ledger:
    """A ledger with its tables and nothing in them: whoever asks for it finds them made, see `url`."""
    return empty_ledger


@pytest.fixture
def w1(ledger: Ledger) -> str:
    """A living worker."""
    ledger.workers.register(birth("w1"))
    return "w1"


@pytest.fixture
def w2(ledger: Ledger) -> str:
    ledger.workers.register(birth("w2"))
    return "w2"


@pytest.fixture
def meddler(url: str, dialect: str, tmp_path: Path) -> Backdoor:
    return SqliteBackdoor(tmp_path / "jobs.db") if dialect == "sqlite" else PostgresBackdoor(url)
