"""Keep the statements that the last release sends to each database, and see whether the present tables answer them.

`python -m tests.contract.last_release` writes them down, for both databases, in `last_release.json`, with the digests
of the release's migrations and functions. Run it with each release. Before the first release, run it after any change
of a statement or a function that this makes incompatible.
"""

import json
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

import apsw
import apsw.ext
import psycopg
from psycopg.pq import ExecStatus

from unstuck.config import Settings
from unstuck.ledger.postgres.database import PACKAGE, QUERY_FILES
from unstuck.ledger.postgres.ledger import PostgresLedger
from unstuck.ledger.postgres.migrate import FUNCTIONS
from unstuck.ledger.postgres.migrate import MIGRATIONS as POSTGRES_MIGRATIONS
from unstuck.ledger.sql import load_queries
from unstuck.ledger.sqlite.database import SQL
from unstuck.ledger.sqlite.ledger import SqliteLedger
from unstuck.ledger.sqlite.migrate import MIGRATIONS as SQLITE_MIGRATIONS

STORED = Path(__file__).with_name("last_release.json")
WHAT_TO_DO = (
    "The workers and clients of the last release would fail in the same way during a rolling upgrade. Keep what they "
    "use for one more release (docs/contributing.md). As long as nothing was released, write the calls down again: "
    "python -m tests.contract.last_release"
)
_PLACE = re.compile(r"%\((\w+)\)[sbt]|%%")


class Call(TypedDict):
    """One statement, and what its answer looks like."""

    sql: str
    columns: list[list[str | None]]
    """Name and type of each."""


Calls = dict[str, Call]


def stored() -> dict[str, Calls]:
    """Return the calls of the last release, by database."""
    found: dict[str, Calls] = json.loads(STORED.read_text())
    return found


def stored_digests(what: str) -> dict[str, str]:
    """Return the digests of the last release's `functions` or migrations, or the `signatures` of its functions."""
    found: dict[str, str] = json.loads(STORED.read_text())[what]
    return found


def current_digests() -> dict[str, dict[str, str]]:
    return {
        "functions": {one.name: one.digest for one in FUNCTIONS},
        "signatures": {one.name: one.signature for one in FUNCTIONS},
        "migrations on postgresql": {one.name: one.digest for one in POSTGRES_MIGRATIONS},
        "migrations on sqlite": {one.name: one.digest for one in SQLITE_MIGRATIONS},
    }


def postgres_statements() -> Mapping[str, str]:
    return load_queries(PACKAGE, *QUERY_FILES, schema='"unstuck"')


def postgres_columns(connection: psycopg.Connection, sql: str) -> list[list[str | None]]:
    """Prepare a statement without running it; AssertionError if the server refuses."""
    pgconn = connection.pgconn
    prepared = pgconn.prepare(b"", _numbered(sql).encode())
    assert prepared.status == ExecStatus.COMMAND_OK, prepared.error_message.decode()
    told = pgconn.describe_prepared(b"")
    names = [(told.fname(n) or b"").decode() for n in range(told.nfields)]
    types = [told.ftype(n) for n in range(told.nfields)]
    named = "select format_type(o.id::oid, null) from unnest(%s::bigint[]) with ordinality o (id, place) order by place"
    return [[name, kind] for name, (kind,) in zip(names, connection.execute(named, (types,)), strict=True)]


def sqlite_columns(connection: apsw.Connection, sql: str) -> list[list[str | None]]:
    """Prepare a statement without running it; AssertionError if SQLite refuses."""
    try:
        return [[name, kind] for name, kind in apsw.ext.query_info(connection, sql).description]
    except apsw.SQLError as error:
        raise AssertionError(str(error)) from None


def _numbered(sql: str) -> str:
    """Write named places as the server knows them: $1, $2, …"""
    names: dict[str, int] = {}
    return _PLACE.sub(lambda match: "%" if match[1] is None else f"${names.setdefault(match[1], len(names) + 1)}", sql)


def _written(calls: Mapping[str, Call] | Mapping[str, str]) -> str:
    """Write one line per name, so that a change of one is a change of one line."""
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(call)}" for name, call in calls.items()) + "\n}"


def main() -> int:
    from tests.support.postgres import start_postgres

    with start_postgres() as server, tempfile.TemporaryDirectory() as folder:
        url = server.new_ledger()
        PostgresLedger(Settings(url=url)).close()
        with psycopg.connect(url, autocommit=True) as connection:
            postgres: Calls = {
                name: {"sql": sql, "columns": postgres_columns(connection, sql)}
                for name, sql in sorted(postgres_statements().items())
            }
        ledger = SqliteLedger(Settings(url=f"sqlite:///{folder}/jobs.db"))
        ledger.migrate()
        ledger.close()
        file = apsw.Connection(f"{folder}/jobs.db")
        sqlite: Calls = {name: {"sql": sql, "columns": sqlite_columns(file, sql)} for name, sql in sorted(SQL.items())}
        file.close()
    digests = ", ".join(f"{json.dumps(what)}: {_written(found)}" for what, found in current_digests().items())
    STORED.write_text(f'{{"postgresql": {_written(postgres)}, "sqlite": {_written(sqlite)}, {digests}}}\n')
    print(f"{len(postgres)} statements for PostgreSQL and {len(sqlite)} for SQLite are in {STORED.name}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
