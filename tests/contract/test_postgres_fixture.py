"""The server that the suite brings can be stopped, started and cut off, and keeps what it was told."""

import psycopg
import pytest
from tests.pg import PgServer


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
