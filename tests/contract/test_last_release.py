"""What the last release sends to a database is answered by the present tables, in the same shape."""

import re
from pathlib import Path

import apsw
import psycopg
from tests.contract.last_release import WHAT_TO_DO, postgres_columns, sqlite_columns, stored
from tests.support.next_release import migrate_to_next
from tests.support.sqlite import ready_sqlite

POSTGRES = Path(__file__).parents[2] / "src/unstuck/ledger/postgres"
CALLED = re.compile(r"(?<!into )\{schema\}\.([a-z_0-9]+) ?\(")
MADE = re.compile(r"function \{schema\}\.([a-z_0-9]+)")
VERSIONED = re.compile(r".+_v[1-9][0-9]*")


def sqlite_file(folder: Path) -> apsw.Connection:
    return apsw.Connection(ready_sqlite(folder).removeprefix("sqlite:///"))


def broken_on_sqlite(connection: apsw.Connection) -> dict[str, str]:
    broken = {}
    for name, call in stored()["sqlite"].items():
        try:
            columns = sqlite_columns(connection, call["sql"])
        except AssertionError as error:
            broken[name] = str(error)
        else:
            if columns != call["columns"]:
                broken[name] = f"the answer was {call['columns']} and is {columns}"
    return broken


def broken_on_postgres(connection: psycopg.Connection) -> dict[str, str]:
    broken = {}
    for name, call in stored()["postgresql"].items():
        try:
            columns = postgres_columns(connection, call["sql"])
        except AssertionError as error:
            broken[name] = str(error)
        else:
            if columns != call["columns"]:
                broken[name] = f"the answer was {call['columns']} and is {columns}"
    return broken


def test_every_call_of_the_last_release_works_on_sqlite(tmp_path: Path) -> None:
    connection = sqlite_file(tmp_path)
    broken = broken_on_sqlite(connection)
    connection.close()
    assert not broken, f"{broken}\n{WHAT_TO_DO}"


def test_every_call_of_the_last_release_works_on_postgresql(ready_pg_url: str) -> None:
    with psycopg.connect(ready_pg_url, autocommit=True) as connection:
        broken = broken_on_postgres(connection)
    assert not broken, f"{broken}\n{WHAT_TO_DO}"


def test_a_call_that_no_longer_works_is_found_on_sqlite(tmp_path: Path) -> None:
    connection = sqlite_file(tmp_path)
    connection.execute("ALTER TABLE unstuck_jobs RENAME COLUMN result TO outcome")
    broken = broken_on_sqlite(connection)
    connection.close()
    assert any("result" in reason for reason in broken.values())


def test_a_call_that_no_longer_works_is_found_on_postgresql(pg_url: str, pg_ledger: object) -> None:
    with psycopg.connect(pg_url, autocommit=True) as connection:
        connection.execute("alter table unstuck.queues rename column paused to halted")
        [(turn,)] = connection.execute(
            "select oid::regprocedure::text from pg_proc "
            "where pronamespace = 'unstuck'::regnamespace and proname ~ '^turn(_v1)?$'"
        )
        connection.execute(f"drop function {turn}".encode())
        broken = broken_on_postgres(connection)
    assert "turn" in broken
    assert any("paused" in reason for reason in broken.values())


def test_one_more_column_on_every_table_breaks_no_call_on_sqlite(tmp_path: Path) -> None:
    url = ready_sqlite(tmp_path)
    migrate_to_next(url)
    connection = apsw.Connection(url.removeprefix("sqlite:///"))
    broken = broken_on_sqlite(connection)
    connection.close()
    assert broken == {}


def test_one_more_column_on_every_table_breaks_no_call_on_postgresql(pg_url: str, pg_ledger: object) -> None:
    migrate_to_next(pg_url)
    with psycopg.connect(pg_url, autocommit=True) as connection:
        assert broken_on_postgres(connection) == {}


def called() -> set[str]:
    files = [*POSTGRES.glob("queries/*.sql"), *POSTGRES.glob("*.py")]
    return {name for file in files for name in CALLED.findall(file.read_text())}


def made() -> set[str]:
    return {name for file in POSTGRES.glob("functions/*.sql") for name in MADE.findall(file.read_text())}


def test_each_function_that_python_calls_has_a_version_in_its_name() -> None:
    """A later release can then add `_v2` and keep `_v1` for the workers of the last one."""
    without = sorted(name for name in called() & made() if not VERSIONED.fullmatch(name))
    assert not without, f"{without} are called by Python: end their names in _v1 (docs/contributing.md)"


def test_each_function_with_a_version_is_called_by_this_release_or_the_last() -> None:
    last = {
        name for call in stored()["postgresql"].values() for name in re.findall(r'"unstuck"\.(\w+) ?\(', call["sql"])
    }
    left = sorted(name for name in made() if VERSIONED.fullmatch(name) and name not in called() | last)
    assert not left, f"{left} are called by nobody: drop them"
