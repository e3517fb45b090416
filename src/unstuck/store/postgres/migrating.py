"""Apply the numbered migrations on PostgreSQL, under a lock, each file in a transaction of its own."""

import zlib

from unstuck import failpoints
from unstuck.domain.errors import SchemaMismatch
from unstuck.store.migrations import Applied, Migration, check_applied, pending, read_migrations
from unstuck.store.postgres.connecting import Address, Connection
from unstuck.store.postgres.lanes import Lane
from unstuck.store.sql import in_schema

MIGRATIONS = read_migrations("unstuck.store.postgres.migrations")
_LOCK_CLASS = 0x756E7374

_TABLE = """
create table if not exists {schema}.migrations (
    number integer primary key, name text not null, applied_at timestamptz not null default clock_timestamp(),
    digest text)
"""
# Digests were not always kept.
_APPLIED = "select m.number, to_jsonb(m) ->> 'digest' from {schema}.migrations m"


def migrate(lane: Lane, schema: str, quoted: str, migrations: tuple[Migration, ...] = MIGRATIONS) -> list[str]:
    """Give the names of what was applied."""
    done: list[str] = []
    with lane.transaction(patient=True) as connection:
        _lock(connection, schema)
        if not _one(connection, "select to_regnamespace(%s) is not null", (quoted,)):
            connection.execute(in_schema("create schema {schema}", quoted).encode())
        connection.execute(in_schema(_TABLE, quoted).encode())
    while True:
        if done and failpoints.active:
            failpoints.reached("migrate.between")
        with lane.transaction(patient=True) as connection:
            # Taken anew for each file and given back by its commit: a pooler may change the session in between.
            _lock(connection, schema)
            left = pending(migrations, _applied(connection, quoted), f"schema {schema!r}")
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
        rows = lane.ask(in_schema(_APPLIED, quoted).encode())
    except SchemaMismatch:
        check_applied(MIGRATIONS, {}, where)
        raise
    check_applied(MIGRATIONS, dict(rows), where)


def _apply(connection: Connection, migration: Migration, quoted: str) -> None:
    connection.execute(in_schema(migration.sql, quoted).encode())
    connection.execute(
        in_schema("insert into {schema}.migrations (number, name, digest) values (%s, %s, %s)", quoted).encode(),
        (migration.number, migration.name, migration.digest),
    )


def _applied(connection: Connection, quoted: str) -> Applied:
    return dict(connection.execute(in_schema(_APPLIED, quoted).encode()).fetchall())


def _lock(connection: Connection, schema: str) -> None:
    key = zlib.crc32(schema.encode()) - 2**31
    connection.execute("select pg_advisory_xact_lock(%s, %s)", (_LOCK_CLASS, key))


def _one(connection: Connection, query: str, values: tuple[object, ...]) -> object:
    row = connection.execute(query.encode(), values).fetchone()
    assert row is not None
    return row[0]
