"""Apply the numbered migrations on PostgreSQL, under a lock, each file in a transaction of its own."""

import zlib

from unstuck import failpoints
from unstuck.domain.errors import SchemaMismatch
from unstuck.store.migrations import Migration, check_applied, pending, read_migrations, refuse_newer
from unstuck.store.postgres.connecting import Address, Connection
from unstuck.store.postgres.lanes import Lane
from unstuck.store.sql import in_schema

MIGRATIONS = read_migrations("unstuck.store.postgres.migrations")
_LOCK_CLASS = 0x756E7374

_TABLE = """
create table if not exists {schema}.migrations (
    number integer primary key, name text not null, applied_at timestamptz not null default clock_timestamp())
"""


def migrate(lane: Lane, schema: str, quoted: str, migrations: tuple[Migration, ...] = MIGRATIONS) -> list[str]:
    """Give the names of what was applied."""
    done: list[str] = []
    with lane.transaction() as connection:
        _lock(connection, schema)
        if not _one(connection, "select to_regnamespace(%s) is not null", (quoted,)):
            connection.execute(in_schema("create schema {schema}", quoted).encode())
        connection.execute(in_schema(_TABLE, quoted).encode())
    while True:
        if done and failpoints.active:
            failpoints.reached("migrate.between")
        with lane.transaction() as connection:
            # Taken anew for each file and given back by its commit: a pooler may change the session in between.
            _lock(connection, schema)
            left = pending(migrations, _applied(connection, quoted))
            if not left:
                return done
            _apply(connection, left[0], quoted)
            if failpoints.active:
                failpoints.reached("migrate.before_commit")
        done.append(left[0].name)


def check_schema(lane: Lane, address: Address, schema: str, quoted: str) -> None:
    """Raise SchemaMismatch unless the tables fit."""
    where = f"schema {schema!r} of {address.where}"
    try:
        rows = lane.ask(in_schema("select number from {schema}.migrations", quoted).encode())
    except SchemaMismatch:
        check_applied(MIGRATIONS, (), where)
        raise
    applied = {int(row[0]) for row in rows}
    refuse_newer(MIGRATIONS, applied)
    check_applied(MIGRATIONS, applied, where)


def _apply(connection: Connection, migration: Migration, quoted: str) -> None:
    connection.execute(in_schema(migration.sql, quoted).encode())
    connection.execute(
        in_schema("insert into {schema}.migrations (number, name) values (%s, %s)", quoted).encode(),
        (migration.number, migration.name),
    )


def _applied(connection: Connection, quoted: str) -> set[int]:
    rows = connection.execute(in_schema("select number from {schema}.migrations", quoted).encode()).fetchall()
    return {int(row[0]) for row in rows}


def _lock(connection: Connection, schema: str) -> None:
    key = zlib.crc32(schema.encode()) - 2**31
    connection.execute("select pg_advisory_xact_lock(%s, %s)", (_LOCK_CLASS, key))


def _one(connection: Connection, query: str, values: tuple[object, ...]) -> object:
    row = connection.execute(query.encode(), values).fetchone()
    assert row is not None
    return row[0]
