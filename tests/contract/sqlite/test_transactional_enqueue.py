"""Enqueue inside the caller's own transaction, on the one copy of SQLite that this process has."""

import sqlite3
from pathlib import Path
from typing import Any

import apsw
import pytest
from tests.support.builders import birth, claim_jobs, new_job

from unstuck.config import Settings
from unstuck.errors import LedgerError, RefusedValue
from unstuck.ledger.sqlite.ledger import SqliteLedger


@pytest.fixture
def ledger(tmp_path: Path) -> SqliteLedger:
    ledger = SqliteLedger(Settings(url=f"sqlite:///{tmp_path}/jobs.db"))
    ledger.migrate()
    return ledger


@pytest.fixture
def connection(ledger: SqliteLedger):  # type: ignore[no-untyped-def]
    connection = apsw.Connection(str(ledger.db.path))
    connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY)")
    yield connection
    connection.close()


def test_the_job_comes_with_the_callers_commit(ledger: SqliteLedger, connection: apsw.Connection) -> None:
    connection.execute("BEGIN IMMEDIATE; INSERT INTO orders VALUES (1)")
    [answer] = ledger.jobs.enqueue_on(connection, [new_job()])
    assert answer.fresh
    assert ledger.jobs.get(answer.job_id) is None
    connection.execute("COMMIT")
    ledger.workers.register(birth())
    assert [job.job_id for job in claim_jobs(ledger)] == [answer.job_id]


def test_the_job_goes_with_the_callers_rollback(ledger: SqliteLedger, connection: apsw.Connection) -> None:
    connection.execute("BEGIN; INSERT INTO orders VALUES (1)")
    ledger.jobs.enqueue_on(connection, [new_job(), new_job()])
    connection.execute("ROLLBACK")
    assert ledger.jobs.count() == {}


def test_a_refused_batch_leaves_the_callers_transaction_as_it_was(
    ledger: SqliteLedger, connection: apsw.Connection
) -> None:
    connection.execute("BEGIN; INSERT INTO orders VALUES (1)")
    with pytest.raises(RefusedValue):
        ledger.jobs.enqueue_on(connection, [new_job(), new_job(unique_key="nul\0")])
    assert connection.in_transaction
    connection.execute("COMMIT")
    assert ledger.jobs.count() == {}
    assert connection.execute("SELECT count(*) FROM orders").get == 1


def test_unique_keys_hold_here_too(ledger: SqliteLedger, connection: apsw.Connection) -> None:
    [first] = ledger.jobs.enqueue([new_job(unique_key="once")])
    with connection:
        [again] = ledger.jobs.enqueue_on(connection, [new_job(unique_key="once")])
    assert (again.job_id, again.fresh) == (first.job_id, False)


def test_another_file_is_refused(ledger: SqliteLedger, tmp_path: Path) -> None:
    for name in (str(tmp_path / "other.db"), ":memory:"):
        other = apsw.Connection(name)
        other.execute("BEGIN")
        with pytest.raises(LedgerError, match="Both must be the same file"):
            ledger.jobs.enqueue_on(other, [new_job()])
        other.close()


def test_the_interpreters_own_sqlite_is_refused_with_the_reason(ledger: SqliteLedger) -> None:
    # In memory: the test must not do what it warns of.
    foreign = sqlite3.connect(":memory:")
    with pytest.raises(LedgerError, match="two copies of SQLite"):
        ledger.jobs.enqueue_on(foreign, [new_job()])
    foreign.close()


def test_a_connection_without_a_transaction_is_refused(ledger: SqliteLedger, connection: apsw.Connection) -> None:
    with pytest.raises(LedgerError, match="no transaction open"):
        ledger.jobs.enqueue_on(connection, [new_job()])


def test_anything_else_is_refused(ledger: SqliteLedger) -> None:
    with pytest.raises(LedgerError, match=r"apsw\.Connection"):
        ledger.jobs.enqueue_on(object(), [new_job()])


def test_a_closed_connection_is_refused_in_our_words(ledger: SqliteLedger, connection: apsw.Connection) -> None:
    connection.close()
    with pytest.raises(LedgerError, match="is closed"):
        ledger.jobs.enqueue_on(connection, [new_job()])


def test_what_the_callers_cursors_do_to_rows_is_not_done_to_ours(
    ledger: SqliteLedger, connection: apsw.Connection
) -> None:
    class Odd(apsw.Cursor):
        def execute(self, *args: Any, **more: Any) -> Any:
            raise AssertionError("this cursor is for the caller")

    connection.row_trace = lambda _cursor, row: {"row": row}
    with connection:
        [first] = ledger.jobs.enqueue_on(connection, [new_job(unique_key="once")])
        connection.cursor_factory = Odd
        [again] = ledger.jobs.enqueue_on(connection, [new_job(unique_key="once")])
    assert (again.job_id, again.fresh) == (first.job_id, False)
