"""The server that the suite brings can be stopped, started and cut off, and keeps what it was told."""

import psycopg
import pytest
from bench.databases import DURABLE, Postgres, Sqlite, open_databases
from tests.support.builders import new_job
from tests.support.postgres import PgServer

from unstuck.config import Settings
from unstuck.ledger.postgres.ledger import PostgresLedger


def test_a_stopped_server_comes_back_with_its_data(pg_server: PgServer, pg_url: str) -> None:
    with psycopg.connect(pg_url) as connection:
        connection.execute("create table kept (id int)")
    pg_server.stop()
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(pg_url)
    pg_server.start()
    with psycopg.connect(pg_url) as connection:
        connection.execute("select * from kept")


def test_every_session_can_be_cut(pg_server: PgServer, pg_url: str) -> None:
    connection = psycopg.connect(pg_url)
    assert pg_server.terminate_all() >= 1
    with pytest.raises(psycopg.OperationalError):
        connection.execute("select 1")
    connection.close()


def test_a_ledger_that_was_lent_comes_back_empty_and_one_that_was_changed_does_not(pg_server: PgServer) -> None:
    url = pg_server.acquire()
    for number in range(2):
        with psycopg.connect(url) as left_open:
            ledger = PostgresLedger(Settings(url=url))
            assert [stored.job_id for stored in ledger.jobs.enqueue([new_job()])] == [1]
            pg_server.release(url)
            ledger.close()
            with pytest.raises(psycopg.OperationalError):
                left_open.execute("select 1")
        again = pg_server.acquire()
        assert (again == url) == (number == 0), "the last one back is the first one lent"
        with psycopg.connect(again) as connection:
            assert connection.execute("select count(*) from unstuck.jobs").fetchone() == (0,)
            if number == 0:
                connection.execute("create table mine (id int)")
    pg_server.release(again)


def test_the_benchmark_compares_two_databases_that_sync_to_the_same_disk() -> None:
    with open_databases(["postgresql", "sqlite"], in_memory=True) as (postgres, sqlite):
        assert isinstance(postgres, Postgres)
        assert isinstance(sqlite, Sqlite)
        assert {name: postgres.setting(name) for name in DURABLE} == DURABLE
        assert postgres.server.data.stat().st_dev == sqlite.folder.stat().st_dev
        assert "fsync=on, full_page_writes=on, synchronous_commit=on, files " in postgres.durability()
        files = sqlite.durability().rpartition(", ")[2]
        assert files.startswith("files on ")
        assert postgres.durability().endswith(files)
