"""Apply the numbered migrations on PostgreSQL, each file in a transaction of its own that never waits long.

Whoever waits for an exclusive lock makes everybody else wait behind it. So each try waits for a lock only for a
moment (LOCK_TIMEOUT_S), gives up what it had, and comes back after a pause.
"""

import zlib
from collections.abc import Callable, Sequence
from functools import partial

from psycopg import sql

from unstuck import failpoints
from unstuck.domain.errors import LedgerBusy, SchemaMismatch
from unstuck.store.migrations import (
    WAIT_S,
    Applied,
    AppliedMigration,
    LockWait,
    Migration,
    check_applied,
    pending,
    read_migrations,
)
from unstuck.store.postgres.blockers import Blockers
from unstuck.store.postgres.connecting import Address, Connection
from unstuck.store.postgres.lanes import Lane
from unstuck.store.sql import in_schema
from unstuck.version import VERSION

MIGRATIONS = read_migrations("unstuck.store.postgres.migrations")
LOCK_TIMEOUT_S = 0.3
"""How long a try waits for a lock, and so how long others wait behind it."""
OTHERS_TIMEOUT_S = 1.0
"""How long a try waits for another `migrate` to end: nobody waits behind that."""
IDLE_TIMEOUT_S = 5.0
"""How long a migration whose process is frozen keeps its locks."""
_LOCK_CLASS = 0x756E7374

_TABLE = """
create table if not exists {schema}.migrations (
    number integer primary key, name text not null, applied_at timestamptz not null default clock_timestamp(),
    digest text not null, works_with integer not null, version text not null)
"""
# A table that lacks a column was made by a draft, and has no digest to compare.
_APPLIED = """
select m.number, case when to_jsonb(m) ?& array['works_with', 'version'] then to_jsonb(m) ->> 'digest' end,
    coalesce((to_jsonb(m) ->> 'works_with')::integer, m.number), coalesce(to_jsonb(m) ->> 'version', '?')
from {schema}.migrations m
"""
_IS_THERE = "select exists (select from {schema}.migrations where number = %s)"
_NOTE = "insert into {schema}.migrations (number, name, digest, works_with, version) values "


def migrate(
    lane: Lane,
    onlooker: Lane,
    schema: str,
    quoted: str,
    migrations: Sequence[Migration] = MIGRATIONS,
    wait_s: float = WAIT_S,
) -> list[str]:
    """Return the names of what was applied. `onlooker` is a second connection, used to see who is in the way."""
    wait = LockWait(wait_s)
    blockers = Blockers(onlooker, LOCK_TIMEOUT_S / 3)
    first = f"The schema {schema!r}"
    _patiently(partial(_prepare, lane, blockers, schema, quoted), first, wait, blockers)
    done: list[str] = []
    while True:
        if done and failpoints.active:
            failpoints.reached("migrate.between")
        left = pending(migrations, _applied(lane, quoted), f"schema {schema!r}")
        if not left:
            return done
        apply = partial(_apply, lane, blockers, schema, quoted, left[0])
        if _patiently(apply, left[0].name, wait, blockers):
            done.append(left[0].name)


def check_schema(lane: Lane, address: Address, schema: str, quoted: str) -> None:
    """Raise SchemaMismatch unless this code works with the tables."""
    where = f"schema {schema!r} of {address.where}"
    try:
        applied = _applied(lane, quoted)
    except SchemaMismatch:
        check_applied(MIGRATIONS, {}, where)
        raise
    check_applied(MIGRATIONS, applied, where)


def _patiently(attempt: Callable[[], bool], name: str, wait: LockWait, blockers: Blockers) -> bool:
    """Try until no lock is in the way; raise MigrationBlocked when time is up."""
    while True:
        try:
            return attempt()
        except LedgerBusy:
            wait.pause(name, blockers.describe(), blockers.cure())


def _prepare(lane: Lane, blockers: Blockers, schema: str, quoted: str) -> bool:
    with lane.transaction(patient=True) as connection, blockers.watched(_backend(connection)):
        _lock(connection, schema)
        if not _one(connection, "select to_regnamespace(%s) is not null", (quoted,)):
            connection.execute(in_schema("create schema {schema}", quoted).encode())
        connection.execute(in_schema(_TABLE, quoted).encode())
    return True


def _apply(lane: Lane, blockers: Blockers, schema: str, quoted: str, migration: Migration) -> bool:
    """Apply one file; False if somebody else has done it meanwhile."""
    with lane.transaction(patient=True) as connection, blockers.watched(_backend(connection)):
        # Taken anew for each file and given back by its commit: a pooler may change the session in between.
        _lock(connection, schema)
        if _one(connection, in_schema(_IS_THERE, quoted), (migration.number,)):
            return False
        # One round trip while it has its locks.
        connection.execute(b"\n;\n".join((_limits(), _sql(migration, quoted), _note(connection, migration, quoted))))
        if failpoints.active:
            failpoints.reached("migrate.before_commit")
    return True


def _limits() -> bytes:
    return (
        f"set local lock_timeout = {LOCK_TIMEOUT_S * 1000:.0f}; "
        f"set local idle_in_transaction_session_timeout = {IDLE_TIMEOUT_S * 1000:.0f}"
    ).encode()


def _sql(migration: Migration, quoted: str) -> bytes:
    return in_schema(migration.sql, quoted).encode()


def _note(connection: Connection, migration: Migration, quoted: str) -> bytes:
    values = (migration.number, migration.name, migration.digest, migration.works_with, VERSION)
    listed = sql.SQL("({})").format(sql.SQL(", ").join(sql.Literal(value) for value in values))
    return in_schema(_NOTE, quoted).encode() + listed.as_bytes(connection)


def _applied(lane: Lane, quoted: str) -> Applied:
    rows = lane.ask(in_schema(_APPLIED, quoted).encode())
    return {number: AppliedMigration(digest, works_with, version) for number, digest, works_with, version in rows}


def _lock(connection: Connection, schema: str) -> None:
    """Allow one `migrate` at a time."""
    key = zlib.crc32(schema.encode()) - 2**31
    connection.execute(f"set local lock_timeout = {OTHERS_TIMEOUT_S * 1000:.0f}".encode())
    connection.execute("select pg_advisory_xact_lock(%s, %s)", (_LOCK_CLASS, key))


def _backend(connection: Connection) -> int:
    # Behind a pooler the session is known only inside the transaction.
    return int(str(_one(connection, "select pg_backend_pid()", ())))


def _one(connection: Connection, query: str, values: tuple[object, ...]) -> object:
    row = connection.execute(query.encode(), values).fetchone()
    assert row is not None
    return row[0]
