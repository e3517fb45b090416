"""Only the primary speaks: a standby's answer may be old, so a server in recovery is refused and tried again."""

from collections.abc import Iterator

import psycopg
import pytest
from tests.contract.hands import birth, put
from tests.pg import PgServer, start_postgres

from unstuck.config import Settings
from unstuck.domain.errors import LedgerUnavailable
from unstuck.store.postgres.ledger import PostgresLedger


@pytest.fixture
def standby() -> Iterator[PgServer]:
    """A server in recovery with a migrated ledger in database t1; `pg_promote()` ends its recovery."""
    with start_postgres() as server:
        server.new_ledger()
        server.stop()
        (server.data / "standby.signal").touch()
        server.start()
        yield server


def test_a_standby_is_refused_with_a_sentence_and_used_once_it_is_promoted(standby: PgServer) -> None:
    for query in ("", "?target_session_attrs=any"):
        ledger = PostgresLedger(Settings(url=standby.url("t1") + query))
        with pytest.raises(LedgerUnavailable, match=r"is a standby \(in recovery\)"):
            ledger.held("w1")
        ledger.close()
    ledger = PostgresLedger(Settings(url=standby.url("t1")))
    with pytest.raises(LedgerUnavailable):
        put(ledger)
    standby.execute("select pg_promote()")
    assert put(ledger)
    ledger.close()


def test_of_several_hosts_the_primary_is_found_wherever_it_stands(
    standby: PgServer, pg_server: PgServer, ready_pg_url: str
) -> None:
    name = ready_pg_url.rpartition("/")[2]
    for first, second in ((standby, pg_server), (pg_server, standby)):
        url = f"postgresql://postgres@127.0.0.1:{first.port},127.0.0.1:{second.port}/{name}"
        ledger = PostgresLedger(Settings(url=url))
        assert put(ledger)
        assert ledger.client_lane.open().connection.info.port == pg_server.port
        ledger.close()


def test_a_session_knows_which_run_of_which_server_it_is_on(pg_ledger: PostgresLedger, pg_url: str) -> None:
    pg_ledger.register(birth("w1"))
    told = pg_ledger.service_lane.open().server
    assert [len(part) > 1 for part in told.split("/")] == [True, True, True]
    assert pg_ledger.service_lane.ask(b"select unstuck.incarnation()") == [(told,)]


def test_a_role_that_may_not_read_the_system_identifier_knows_the_rest(
    pg_ledger: PostgresLedger, pg_url: str, pg_server: PgServer
) -> None:
    name = pg_url.rpartition("/")[2]
    pg_server.execute("drop role if exists unprivileged; create role unprivileged login")
    pg_server.execute("revoke execute on function pg_catalog.pg_control_system() from public", name)
    pg_server.execute("grant usage on schema unstuck to unprivileged", name)
    ledger = PostgresLedger(Settings(url=pg_server.url(name, "unprivileged")))
    told = ledger.read_lane.open().server
    assert told == "-/" + pg_ledger.read_lane.open().server.partition("/")[2]
    assert ledger.read_lane.ask(b"select unstuck.incarnation()") == [(told,)]
    ledger.close()


def test_a_restart_and_a_promotion_are_new_incarnations(standby: PgServer) -> None:
    def incarnation() -> str:
        with psycopg.connect(standby.url("t1")) as connection:
            row = connection.execute("select unstuck.incarnation()").fetchone()
        assert row is not None
        return str(row[0])

    in_recovery = incarnation()
    standby.execute("select pg_promote()")
    promoted = incarnation()
    standby.stop()
    standby.start()
    assert len({in_recovery, promoted, incarnation()}) == 3
