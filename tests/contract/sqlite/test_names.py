"""Live in the user's file: whatever their tables are called, they stay theirs, and the ledger works beside them."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest
from tests.support.builders import birth, done, new_job, put, run, turn

from unstuck.config import Settings
from unstuck.errors import LedgerError, SchemaMismatch
from unstuck.ledger.sqlite.ledger import SqliteLedger

THEIRS = (
    "jobs",
    "tasks",
    "events",
    "queues",
    "workers",
    "attempts",
    "outputs",
    "ledger",
    "migrations",
    "worker_heartbeats",
    "tickets",
)
VIEWS = frozenset({"worker_status", "heartbeats", "attempt_status"})
SCHEMA = "SELECT type, name, sql FROM sqlite_schema ORDER BY name"


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[apsw.Connection]:
    """The user's own connection, on a file that is in use already."""
    connection = apsw.Connection(str(tmp_path / "shop.db"))
    for name in THEIRS:
        connection.execute(f"CREATE TABLE {name} (mine TEXT); CREATE INDEX {name}_ready ON {name} (mine)")
        connection.execute(f"INSERT INTO {name} VALUES ('kept')")
    yield connection
    connection.close()


@pytest.fixture
def empty_ledger(connection: apsw.Connection) -> Iterator[SqliteLedger]:
    ledger = SqliteLedger(Settings(url=f"sqlite:///{connection.filename}"))
    yield ledger
    ledger.close()


@pytest.fixture
def ledger(empty_ledger: SqliteLedger) -> SqliteLedger:
    empty_ledger.migrate()
    return empty_ledger


def theirs(connection: apsw.Connection) -> dict[str, list[str]]:
    return {name: [mine for (mine,) in connection.execute(f"SELECT mine FROM {name}")] for name in THEIRS}


def test_everything_but_the_views_has_our_prefix(tmp_path: Path) -> None:
    ledger = SqliteLedger(Settings(url=f"sqlite:///{tmp_path}/jobs.db"))
    ledger.migrate()
    with ledger.db.read() as cursor:
        names = [str(name) for (name,) in cursor.execute("SELECT name FROM sqlite_schema")]
    # What begins with sqlite_ is SQLite's own, and made from our names where it is not shared.
    assert {name for name in names if not name.startswith(("unstuck_", "sqlite_"))} == VIEWS
    ledger.close()


def test_tables_of_theirs_with_our_names_are_not_taken_for_a_ledger(empty_ledger: SqliteLedger) -> None:
    with pytest.raises(SchemaMismatch, match=r"There is no ledger in .* yet"):
        empty_ledger.check_schema()
    with pytest.raises(SchemaMismatch, match="unstuck migrate"):
        put(empty_ledger)


def test_a_ledger_lives_beside_tables_that_have_its_names(ledger: SqliteLedger, connection: apsw.Connection) -> None:
    ledger.check_schema()
    ledger.workers.register(birth("w1"))
    put(ledger)
    jobs = run(ledger)
    turn(ledger, done=[done(job) for job in jobs])
    assert ledger.jobs.count() == {"succeeded": 1}
    assert ledger.maintenance.prune(-60.0) == 1
    assert theirs(connection) == {name: ["kept"] for name in THEIRS}


def test_a_row_of_their_jobs_and_one_of_ours_come_with_one_commit(
    ledger: SqliteLedger, connection: apsw.Connection
) -> None:
    with connection:
        connection.execute("INSERT INTO jobs VALUES ('new')")
        [answer] = ledger.jobs.enqueue_on(connection, [new_job()])
    assert ledger.jobs.get(answer.job_id) is not None
    assert theirs(connection)["jobs"] == ["kept", "new"]


def test_a_row_of_their_jobs_and_one_of_ours_go_with_one_rollback(
    ledger: SqliteLedger, connection: apsw.Connection
) -> None:
    connection.execute("BEGIN IMMEDIATE; INSERT INTO jobs VALUES ('new')")
    ledger.jobs.enqueue_on(connection, [new_job()])
    connection.execute("ROLLBACK")
    assert ledger.jobs.count() == {}
    assert theirs(connection)["jobs"] == ["kept"]


def test_their_tables_can_be_dropped_and_renamed(ledger: SqliteLedger, connection: apsw.Connection) -> None:
    """SQLite reads every view when a table is renamed: none of ours may lean on a table of theirs."""
    put(ledger)
    connection.execute("DROP TABLE workers; ALTER TABLE jobs RENAME TO positions")
    assert ledger.jobs.count() == {"pending": 1}
    assert connection.execute("SELECT count(*) FROM worker_status").get == 0


@pytest.mark.parametrize("name", [*sorted(VIEWS), "Heartbeats"])
@pytest.mark.parametrize(
    "statement", ["CREATE TABLE {} (mine)", "CREATE VIEW {} AS SELECT 1", "CREATE INDEX {} ON jobs (mine)"]
)
def test_a_name_that_a_view_needs_is_refused_with_the_cure_and_nothing_is_written(
    empty_ledger: SqliteLedger, connection: apsw.Connection, name: str, statement: str
) -> None:
    connection.execute(statement.format(name))
    before = connection.execute(SCHEMA).fetchall()
    with pytest.raises(LedgerError, match=rf"{name.lower()}.*: rename it, or give the ledger a file of its own\.$"):
        empty_ledger.migrate()
    assert connection.execute(SCHEMA).fetchall() == before


def test_a_clash_that_was_cured_is_forgotten(empty_ledger: SqliteLedger, connection: apsw.Connection) -> None:
    connection.execute("CREATE TABLE heartbeats (mine)")
    with pytest.raises(LedgerError, match="heartbeats"):
        empty_ledger.migrate()
    connection.execute("ALTER TABLE heartbeats RENAME TO pulses")
    assert empty_ledger.migrate()
    put(empty_ledger)


READERS = {
    "the sqlite3 of Python": [
        sys.executable,
        "-c",
        "import sqlite3, sys; print(*sqlite3.connect(sys.argv[1]).execute(sys.argv[2]).fetchone(), sep='|')",
    ],
    "the program sqlite3": ["sqlite3"],
}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_the_views_are_read_by_older_copies_of_sqlite(
    ledger: SqliteLedger, connection: apsw.Connection, reader: list[str]
) -> None:
    if shutil.which(reader[0]) is None:
        pytest.skip(f"there is no {reader[0]}")
    ledger.workers.register(birth("w1", name="ada"))
    put(ledger)
    [job] = run(ledger)
    for query, expected in (
        ("SELECT worker_id, name, active_tasks, minutes_since_heartbeat < 5 FROM worker_status", "w1|ada|1|1"),
        ("SELECT task_id, sender_name, length(sent_at) FROM heartbeats", f"{job.job_id}|ada|23"),
        ("SELECT job_id, state, heartbeat_deadline IS NOT NULL FROM attempt_status", f"{job.job_id}|running|1"),
    ):
        # In a process of its own: two copies of SQLite in one process would drop each other's locks.
        done = subprocess.run([*reader, connection.filename, query], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected


def test_no_view_needs_a_newer_sqlite_than_debian_has(ledger: SqliteLedger, connection: apsw.Connection) -> None:
    views = [sql for kind, _, sql in connection.execute(SCHEMA) if kind == "view"]
    assert len(views) == len(VIEWS)
    # 'subsec' came with 3.42, and is NULL before it.
    assert not [sql for sql in views if "subsec" in sql]
