"""The functions of a PostgreSQL ledger in an upgrade: newer code replaces them, and drops those that no code needs."""

import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from tests.contract.test_migrations import migrate_elsewhere
from tests.support.builders import put

from unstuck.config import Settings
from unstuck.errors import SchemaForked, SchemaMismatch
from unstuck.ledger.migrate import Migration, pending
from unstuck.ledger.postgres import migrate
from unstuck.ledger.postgres.function_changes import FunctionChanges, StoredFunction, compare
from unstuck.ledger.postgres.function_files import Function, parse_functions, parse_macros, read_functions
from unstuck.ledger.postgres.ledger import PostgresLedger
from unstuck.ledger.postgres.migrate import FUNCTIONS, MIGRATIONS

KNOWN = len(MIGRATIONS)


def colour(result: str, arguments: str = "", name: str = "colour_v1") -> Function:
    """A function of the next version."""
    head = f"create or replace function {{schema}}.{name}({arguments}) returns text\nlanguage sql stable\n"
    return Function(name, f"({arguments}) returns text", f"{head}as $body$ select '{result}' $body$;")


def following(works_with: int, sql: str = "select 1", number: int = KNOWN + 1) -> Migration:
    return Migration(number, f"{number:04}_next", f"-- works with code from schema: {works_with}\n{sql};")


@pytest.fixture
def session(pg_url: str, pg_ledger: PostgresLedger) -> Iterator[psycopg.Connection]:
    with psycopg.connect(pg_url, autocommit=True) as connection:
        yield connection


def functions_there(session: psycopg.Connection, name: str) -> list[str]:
    query = "select oid::regprocedure::text from pg_proc where pronamespace = 'unstuck'::regnamespace and proname = %s"
    return [found for (found,) in session.execute(query, (name,))]


def shown(session: psycopg.Connection, call: str = "colour_v1()") -> str:
    row = session.execute(f"select unstuck.{call}".encode()).fetchone()
    assert row is not None
    return str(row[0])


def test_a_changed_function_is_replaced_once_and_its_grants_stay(
    pg_ledger: PostgresLedger, session: psycopg.Connection
) -> None:
    assert pg_ledger.migrate(functions=[*FUNCTIONS, colour("grey")]) == ["function colour_v1"]
    session.execute("revoke execute on function unstuck.colour_v1() from public")
    before = session.execute("select proacl::text from pg_proc where proname = 'colour_v1'").fetchone()
    assert pg_ledger.migrate(functions=[*FUNCTIONS, colour("green")]) == ["function colour_v1"]
    assert shown(session) == "green"
    assert session.execute("select proacl::text from pg_proc where proname = 'colour_v1'").fetchone() == before
    assert pg_ledger.migrate(functions=[*FUNCTIONS, colour("green")]) == []


def test_a_function_with_other_arguments_or_another_result_takes_the_place_of_the_old_one(
    pg_ledger: PostgresLedger, session: psycopg.Connection
) -> None:
    pg_ledger.migrate(functions=[*FUNCTIONS, colour("grey", "a integer")])
    pg_ledger.migrate(functions=[*FUNCTIONS, colour("green", "b integer, c text default 'x'")])
    assert functions_there(session, "colour_v1") == ["unstuck.colour_v1(integer,text)"]
    number = Function("colour_v1", "() returns integer", colour("7").sql.replace("returns text", "returns integer"))
    number = replace(number, sql=number.sql.replace("'7'", "7"))
    pg_ledger.migrate(functions=[*FUNCTIONS, number])
    assert functions_there(session, "colour_v1") == ["unstuck.colour_v1()"]


def test_functions_change_in_the_transaction_of_the_migration(
    pg_ledger: PostgresLedger, session: psycopg.Connection
) -> None:
    broken = replace(colour("green"), sql=colour("green").sql.replace("returns text", "returns no_such_type"))
    migrations = (*MIGRATIONS, following(KNOWN, "create table {schema}.colours (name text)"))
    with pytest.raises(Exception, match="no_such_type"):
        pg_ledger.migrate(migrations=migrations, functions=[*FUNCTIONS, broken])
    assert session.execute("select to_regclass('unstuck.colours')").fetchone() == (None,)
    assert pg_ledger.migrate(migrations=migrations, functions=[*FUNCTIONS, colour("green")]) == [
        migrations[-1].name,
        "function colour_v1",
    ]
    assert session.execute("select count(*) from unstuck.colours").fetchone() == (0,)


def test_functions_wait_for_the_last_of_several_migrations_but_those_that_a_view_uses(
    pg_ledger: PostgresLedger, session: psycopg.Connection
) -> None:
    view = "-- uses functions: colour_v1\ncreate view {schema}.colours as select {schema}.colour_v1() as name"
    second = following(KNOWN, "select 1 / 0", KNOWN + 2)
    functions = [*FUNCTIONS, colour("green"), colour("large", name="size_v1")]
    with pytest.raises(Exception, match="division by zero"):
        pg_ledger.migrate(migrations=(*MIGRATIONS, following(KNOWN, view), second), functions=functions)
    assert session.execute("select name from unstuck.colours").fetchone() == ("green",)
    assert functions_there(session, "size_v1") == []
    second = following(KNOWN, "select 1", KNOWN + 2)
    done = pg_ledger.migrate(migrations=(*MIGRATIONS, following(KNOWN, view), second), functions=functions)
    assert done == [second.name, "function size_v1"]


def test_older_code_does_not_put_its_functions_back(pg_ledger: PostgresLedger, session: psycopg.Connection) -> None:
    newer = [replace(one, sql=one.sql.replace("as $body$", "as $body$ -- newer")) for one in FUNCTIONS]
    pg_ledger.migrate(migrations=(*MIGRATIONS, following(KNOWN)), functions=newer)
    bodies = session.execute("select proname, prosrc from pg_proc where prosrc like ' -- newer%'").fetchall()
    assert len(bodies) == len(FUNCTIONS)
    assert pg_ledger.migrate() == []
    pg_ledger.check_schema()
    assert put(pg_ledger)
    assert session.execute("select proname, prosrc from pg_proc where prosrc like ' -- newer%'").fetchall() == bodies


def test_older_code_that_looked_before_the_newer_code_migrated_does_not_put_its_functions_back(
    pg_ledger: PostgresLedger, session: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks again when it has the lock under which one `migrate` at a time works."""
    session.execute("delete from unstuck.functions where name = 'turn_v1'")

    def look_and_be_overtaken(*looked: Any) -> list[Migration]:
        session.execute(
            "insert into unstuck.migrations (number, name, digest, works_with, version) values (%s, 'x', '', %s, '9') "
            "on conflict do nothing",
            (KNOWN + 1, KNOWN),
        )
        return pending(*looked)

    monkeypatch.setattr(migrate, "pending", look_and_be_overtaken)
    assert pg_ledger.migrate() == []
    assert session.execute("select count(*) from unstuck.functions where name = 'turn_v1'").fetchone() == (0,)


def test_code_whose_functions_are_not_in_place_names_them_and_the_cure(
    pg_ledger: PostgresLedger, session: psycopg.Connection
) -> None:
    session.execute("update unstuck.functions set digest = 'another' where name in ('turn_v1', 'beat_v1')")
    with pytest.raises(SchemaMismatch, match=r"functions .* not those of this code: .*turn_v1\. Run `unstuck migrate`"):
        pg_ledger.check_schema()
    assert pg_ledger.migrate() == ["2 functions"]
    pg_ledger.check_schema()


def test_a_function_that_is_gone_from_the_files_is_dropped_when_no_code_that_had_it_works_any_more(
    pg_ledger: PostgresLedger, session: psycopg.Connection
) -> None:
    pg_ledger.migrate(functions=[*FUNCTIONS, colour("grey")])
    second = following(KNOWN)
    pg_ledger.migrate(migrations=(*MIGRATIONS, second))
    assert functions_there(session, "colour_v1"), "code of the last release may call it"
    third = following(KNOWN + 1, number=KNOWN + 2)
    pg_ledger.migrate(migrations=(*MIGRATIONS, second, third))
    assert functions_there(session, "colour_v1") == []
    assert session.execute("select count(*) from unstuck.functions where name = 'colour_v1'").fetchone() == (0,)


def test_a_function_that_the_next_release_still_has_is_not_dropped(
    pg_ledger: PostgresLedger, session: psycopg.Connection
) -> None:
    second, third = following(KNOWN), following(KNOWN + 1, number=KNOWN + 2)
    pg_ledger.migrate(functions=[*FUNCTIONS, colour("grey")])
    pg_ledger.migrate(migrations=(*MIGRATIONS, second), functions=[*FUNCTIONS, colour("grey")])
    pg_ledger.migrate(migrations=(*MIGRATIONS, second, third))
    assert functions_there(session, "colour_v1"), "code that knows the second migration has it, and still works"


def test_a_migrate_that_is_killed_before_its_commit_leaves_the_old_functions(
    pg_url: str, pg_ledger: PostgresLedger, session: psycopg.Connection
) -> None:
    session.execute("update unstuck.functions set digest = 'another'")
    killed = migrate_elsewhere(pg_url, "migrate.before_commit=kill")
    killed.communicate(timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert session.execute("select count(*) from unstuck.functions where digest = 'another'").fetchone() == (
        len(FUNCTIONS),
    )
    assert pg_ledger.migrate() == [f"{len(FUNCTIONS)} functions"]


def test_four_processes_replace_the_functions_once(
    pg_url: str, pg_ledger: PostgresLedger, session: psycopg.Connection
) -> None:
    session.execute("update unstuck.functions set digest = 'another'")
    processes = [migrate_elsewhere(pg_url) for _ in range(4)]
    said = []
    for process in processes:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        said.append(out.strip())
    assert sorted(said) == ["", "", "", f"{len(FUNCTIONS)} functions"]


def test_a_ledger_of_the_drafts_before_the_schema_was_squashed_is_refused_and_left_alone(pg_url: str) -> None:
    """It has more migrations than this code, but that is not why: no version to install would work with it."""
    with psycopg.connect(pg_url, autocommit=True) as draft:
        draft.execute("create schema unstuck")
        draft.execute(
            "create table unstuck.migrations (number integer primary key, name text not null, applied_at timestamptz, "
            "digest text not null, works_with integer not null, version text not null)"
        )
        draft.execute(
            "insert into unstuck.migrations select n, format('%s_draft', n), now(), 'draft', n, '0.1.0' "
            "from generate_series(1, 26) n"
        )
        ledger = PostgresLedger(Settings(url=pg_url))
        for check in (ledger.check_schema, ledger.migrate):
            with pytest.raises(SchemaForked, match=r"never released: its 0001_schema was not"):
                check()
        ledger.close()
        tables = draft.execute("select tablename from pg_tables where schemaname = 'unstuck'").fetchall()
        assert tables == [("migrations",)]


def stored(one: Function, number: int, digest: str | None = None) -> dict[str, StoredFunction]:
    return {one.name: StoredFunction(digest or one.digest, one.signature, number)}


def test_what_is_compared() -> None:
    old, new = colour("grey"), colour("green", "a integer")
    assert not compare([old], stored(old, 3), number=3, oldest=2)
    assert compare([old], {}, number=3, oldest=2) == FunctionChanges((old,))
    assert compare([old], stored(old, 2), number=3, oldest=2) == FunctionChanges(confirmed=(old,))
    assert compare([new], stored(old, 3), number=3, oldest=2) == FunctionChanges((new,), frozenset({"colour_v1"}))
    assert not compare([], stored(old, 2), number=3, oldest=2)
    assert compare([], stored(old, 1), number=3, oldest=2) == FunctionChanges(dropped=("colour_v1",))


MACROS = parse_macros("-- name: one\nset a = 1\n\n-- name: two\n-- Why.\n{one}\nset b = 2\n")
TEXT = """-- Why.
create or replace function {schema}.f(
    a int) returns int
language sql
{two}
as $body$
select '{}'
$body$;
"""


def test_a_macro_stands_for_its_lines_and_may_begin_with_another() -> None:
    [found] = parse_functions("f.sql", TEXT, MACROS)
    assert found.name == "f"
    assert found.signature == "( a int) returns int"
    assert "\nlanguage sql\nset a = 1\nset b = 2\nas $body$\nselect '{}'\n" in found.sql


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (TEXT.replace("{two}", "{three}"), "macro {three}"),
        (TEXT + "create table a (b int);\n", "no function: create table"),
        (TEXT.replace("\nlanguage", " language") + TEXT.replace(".f(", ".g("), "f has no line that begins"),
    ],
)
def test_a_mistake_in_a_file_of_functions_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        list(parse_functions("f.sql", text, MACROS))


def test_a_function_with_two_definitions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "unstuck.ledger.postgres.function_files"
    monkeypatch.setattr(f"{module}.parse_functions", lambda *_: [colour("grey")])
    with pytest.raises(ValueError, match=r"colour_v1.*one definition"):
        read_functions()
