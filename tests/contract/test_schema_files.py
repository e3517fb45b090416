"""An empty database becomes the checked-in schema, and released files are only added to."""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path

import apsw
import psycopg
import pytest
from tests.contract.last_release import stored_digests
from tests.contract.schema_dump import POSTGRES, SQLITE, STORED, dump_postgres, dump_sqlite
from tests.support.sqlite import ready_sqlite

from unstuck.ledger.migrate import Migration
from unstuck.ledger.postgres.function_files import Function
from unstuck.ledger.postgres.migrate import FUNCTIONS, MIGRATIONS
from unstuck.ledger.sqlite.migrate import MIGRATIONS as SQLITE_MIGRATIONS

RENEW = "If that is what you want, write it down: python -m tests.contract.schema_dump (docs/contributing.md)"
SOURCE = Path(__file__).parents[2] / "src/unstuck/ledger"


def compare(name: str, found: str) -> None:
    wanted = (STORED / name).read_text()
    difference = difflib.unified_diff(wanted.splitlines(), found.splitlines(), name, "migrate makes", lineterm="")
    assert found == wanted, "\n".join([*difference, RENEW])


def test_an_empty_postgresql_becomes_the_checked_in_schema(ready_pg_url: str) -> None:
    with psycopg.connect(ready_pg_url, autocommit=True) as connection:
        compare(POSTGRES, dump_postgres(connection))


def test_an_empty_sqlite_file_becomes_the_checked_in_schema(tmp_path: Path) -> None:
    connection = apsw.Connection(ready_sqlite(tmp_path).removeprefix("sqlite:///"))
    found = dump_sqlite(connection)
    connection.close()
    compare(SQLITE, found)


@pytest.mark.parametrize(
    "change",
    [
        "alter table unstuck.jobs add column colour text",
        "alter table unstuck.jobs alter column task drop not null",
        "alter table unstuck.jobs drop constraint place_in_a_workflow",
        "alter table unstuck.worker_heartbeats set (fillfactor = 90)",
        "alter sequence unstuck.tokens cache 1",
        "drop index unstuck.jobs_held",
        "alter function unstuck.beat_v1 reset jit",
        "create trigger colours after insert on unstuck.jobs execute function suppress_redundant_updates_trigger()",
        "grant select on unstuck.jobs to public",
        "comment on column unstuck.jobs.task is 'the task'",
    ],
)
def test_the_dump_of_postgresql_shows_each_kind_of_change(ready_pg_url: str, change: str) -> None:
    with psycopg.connect(ready_pg_url) as connection:
        before = dump_postgres(connection)
        connection.execute(change.encode())
        assert dump_postgres(connection) != before
        connection.rollback()


@pytest.mark.parametrize(
    "change",
    [
        "ALTER TABLE unstuck_jobs ADD COLUMN colour TEXT",
        "DROP INDEX unstuck_jobs_held",
        "CREATE TRIGGER colours AFTER INSERT ON unstuck_jobs BEGIN SELECT 1; END",
    ],
)
def test_the_dump_of_sqlite_shows_each_kind_of_change(tmp_path: Path, change: str) -> None:
    connection = apsw.Connection(ready_sqlite(tmp_path).removeprefix("sqlite:///"))
    before = dump_sqlite(connection)
    connection.execute(change)
    after = dump_sqlite(connection)
    connection.close()
    assert after != before


def test_every_function_compiles(ready_pg_url: str) -> None:
    """`migrate` creates them unchecked, in any order. PostgreSQL checks them here, when all of them are there."""
    with psycopg.connect(ready_pg_url, autocommit=True) as connection:
        connection.execute("set check_function_bodies = on")
        found = connection.execute(
            "select p.proname, v.proname, p.oid from pg_proc p join pg_language l on l.oid = p.prolang "
            "join pg_proc v on v.oid = l.lanvalidator where p.pronamespace = 'unstuck'::regnamespace"
        ).fetchall()
        assert {name for name, _, _ in found} == {one.name for one in FUNCTIONS}
        for _, validator, function in found:
            connection.execute(f"select {validator}(%s::oid)".encode(), (function,))


def test_functions_stand_in_their_files_alone() -> None:
    stray = [path.name for path in SOURCE.glob("postgres/schema/*.sql") if "function {schema}." in path.read_text()]
    assert stray == [], "put functions into ledger/postgres/functions"


def changed_after_release(migrations: Sequence[Migration], released: Mapping[str, str]) -> list[str]:
    last = migrations[0].last_released
    return [one.name for one in migrations[:last] if released.get(one.name) != one.digest]


@pytest.mark.parametrize(
    ("what", "migrations"), [("migrations on postgresql", MIGRATIONS), ("migrations on sqlite", SQLITE_MIGRATIONS)]
)
def test_a_released_migration_is_never_changed(what: str, migrations: Sequence[Migration]) -> None:
    changed = changed_after_release(migrations, stored_digests(what))
    assert not changed, f"{changed} were released: ledgers have them as they were. Add a migration instead"


def test_a_released_migration_that_was_changed_is_found() -> None:
    released = Migration(1, "0001_schema", "create table a (b int)", last_released=1)
    assert changed_after_release([released], {"0001_schema": released.digest}) == []
    assert changed_after_release([Migration(1, "0001_schema", "create table a ()", 1)], {"0001_schema": "x"})


def signed_anew(functions: Sequence[Function], released: Mapping[str, str], last_released: int) -> list[str]:
    return [one.name for one in functions if last_released and released.get(one.name, one.signature) != one.signature]


def test_a_released_function_keeps_its_signature() -> None:
    found = signed_anew(FUNCTIONS, stored_digests("signatures"), MIGRATIONS[0].last_released)
    assert not found, f"calls of {found} that are under way during an upgrade would fail: give it a new name instead"


def test_a_released_function_with_another_signature_is_found() -> None:
    function = Function("turn_v1", "(a integer) returns text", "")
    assert signed_anew([function], {"turn_v1": "() returns text"}, last_released=1) == ["turn_v1"]
    assert signed_anew([function], {"turn_v1": function.signature}, last_released=1) == []
    assert signed_anew([function], {}, last_released=1) == []


def changed_without_a_number(
    migrations: Sequence[Migration], functions: Sequence[Function], released: Mapping[str, str]
) -> list[str]:
    last = migrations[0].last_released
    if not last or len(migrations) > last:
        return []
    return [one.name for one in functions if released.get(one.name) != one.digest]


def test_a_release_that_changes_functions_has_a_new_migration() -> None:
    changed = changed_without_a_number(MIGRATIONS, FUNCTIONS, stored_digests("functions"))
    assert not changed, (
        f"{changed} changed since the last release, and no migration was added. Its number is how an older release "
        "knows that it must not put its own functions back: add one, even without a statement"
    )


def test_a_changed_function_without_a_new_migration_is_found() -> None:
    released, following = Migration(1, "0001_a", "", last_released=1), Migration(2, "0002_b", "", last_released=1)
    function = Function("turn_v1", "()", "now")
    assert changed_without_a_number([released], [function], {"turn_v1": "before"}) == ["turn_v1"]
    assert changed_without_a_number([released, following], [function], {"turn_v1": "before"}) == []
    assert changed_without_a_number([released], [function], {"turn_v1": function.digest}) == []
