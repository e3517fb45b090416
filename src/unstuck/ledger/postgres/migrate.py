"""Apply the numbered migrations and the functions on PostgreSQL, in transactions that never wait long.

A session that waits for an exclusive lock makes all others wait behind it. So each try waits for a lock only for a
moment (LOCK_TIMEOUT_S), gives up what it had, and comes back after a pause.

Each migration has a transaction of its own. The functions of `functions/` whose digest differs are replaced in that of
the last migration, or in one of their own if no migration is left.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from psycopg import sql

from unstuck import failpoints
from unstuck.errors import LedgerBusy, SchemaMismatch
from unstuck.ledger.migrate import (
    CURE_OLD,
    WAIT_S,
    Applied,
    AppliedMigration,
    LockWait,
    Migration,
    check_applied,
    pending,
    read_migrations,
)
from unstuck.ledger.postgres.connect import Address, Connection
from unstuck.ledger.postgres.connection import ManagedConnection, Row
from unstuck.ledger.postgres.function_changes import (
    READ,
    FunctionChanges,
    StoredFunction,
    changed,
    compare,
    create,
    note,
)
from unstuck.ledger.postgres.function_files import Function, read_functions
from unstuck.ledger.postgres.locks import Blockers
from unstuck.ledger.sql import in_schema
from unstuck.version import VERSION

MIGRATIONS = read_migrations("unstuck.ledger.postgres.schema")
FUNCTIONS = read_functions()
LOCK_TIMEOUT_S = 0.3
"""How long a try waits for a lock, and so how long others wait behind it."""
OTHERS_TIMEOUT_S = 1.0
"""How long a try waits for another `migrate` to end: no worker or client waits behind that."""
IDLE_TIMEOUT_S = 5.0
"""How long a migration whose process is frozen keeps its locks."""
MAX_NAMED = 5
"""How many functions an error names."""
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
_NOTE = "insert into {schema}.migrations (number, name, digest, works_with, version) values "


@dataclass(frozen=True)
class _Target:
    """A schema, and what this code wants it to be."""

    lane: ManagedConnection
    blockers: Blockers
    schema: str
    quoted: str
    migrations: Sequence[Migration]
    functions: Sequence[Function]

    @property
    def known(self) -> int:
        """The newest migration that this code has."""
        return len(self.migrations)


def migrate(
    connection: ManagedConnection,
    onlooker: ManagedConnection,
    schema: str,
    quoted: str,
    migrations: Sequence[Migration] = MIGRATIONS,
    wait_s: float = WAIT_S,
    functions: Sequence[Function] = FUNCTIONS,
) -> list[str]:
    """Return the names of what was applied. `onlooker` is a second connection, used to see who is in the way."""
    wait = LockWait(wait_s)
    target = _Target(connection, Blockers(onlooker, LOCK_TIMEOUT_S / 3), schema, quoted, migrations, functions)
    _patiently(partial(_prepare, target), f"The schema {schema!r}", wait, target.blockers)
    done: list[str] = []
    while True:
        if done and failpoints.active:
            failpoints.reached("migrate.between")
        applied = _applied(connection, quoted)
        left = pending(migrations, applied, f"schema {schema!r}")
        if not left and not _differences(target, applied, _stored(connection.ask, quoted, applied)):
            return done
        name = left[0].name if left else "The change of functions"
        done += _patiently(partial(_apply, target, left), name, wait, target.blockers)


def check_schema(connection: ManagedConnection, address: Address, schema: str, quoted: str) -> None:
    """Raise SchemaMismatch unless this code works with the tables and the functions."""
    where = f"schema {schema!r} of {address.where}"
    try:
        applied = _applied(connection, quoted)
    except SchemaMismatch:
        check_applied(MIGRATIONS, {}, where)
        raise
    check_applied(MIGRATIONS, applied, where)
    if max(applied) > len(MIGRATIONS):
        return
    others = [one.name for one in changed(FUNCTIONS, _stored(connection.ask, quoted, applied))]
    if others:
        more = f" and {len(others) - MAX_NAMED} more" if len(others) > MAX_NAMED else ""
        names = ", ".join(others[:MAX_NAMED])
        raise SchemaMismatch(f"The functions in {where} are not those of this code: {names}{more}. {CURE_OLD}")


def _patiently(attempt: Callable[[], list[str]], name: str, wait: LockWait, blockers: Blockers) -> list[str]:
    """Try until no lock is in the way; raise MigrationBlocked when time is up."""
    while True:
        try:
            return attempt()
        except LedgerBusy:
            wait.pause(name, blockers.describe(), blockers.cure())


def _prepare(target: _Target) -> list[str]:
    with _transaction(target) as connection:
        if not _one(connection, "select to_regnamespace(%s) is not null", (target.quoted,)):
            connection.execute(in_schema("create schema {schema}", target.quoted).encode())
        connection.execute(in_schema(_TABLE, target.quoted).encode())
    return []


def _apply(target: _Target, left: Sequence[Migration]) -> list[str]:
    """Apply the first of the migrations that are left, and with the last one the functions; return their names."""
    migration = left[0] if left else None
    with _transaction(target) as connection:
        applied = _of_rows(connection.execute(in_schema(_APPLIED, target.quoted).encode()).fetchall())
        if migration is not None and migration.number in applied:
            return []  # another `migrate` was faster
        stored = _stored(lambda query: connection.execute(query).fetchall(), target.quoted, applied)
        if migration is not None:
            applied = {**applied, migration.number: AppliedMigration(migration.digest, migration.works_with, VERSION)}
        changes = _differences(target, applied, stored)
        if migration is not None and len(left) > 1:
            changes = changes.only(migration.uses)
        # One round trip while it has its locks.
        connection.execute(b"\n;\n".join(_statements(connection, target, migration, changes)))
        if failpoints.active:
            failpoints.reached("migrate.before_commit")
    return [*([migration.name] if migration else []), *_named(changes)]


def _statements(
    connection: Connection, target: _Target, migration: Migration | None, changes: FunctionChanges
) -> Iterator[bytes]:
    yield _limits()
    rest = changes
    if migration is not None:
        first = changes.only(migration.uses)
        rest = replace(changes, replaced=tuple(one for one in changes.replaced if one not in first.replaced))
        yield from create(connection, target.quoted, first)
        yield in_schema(migration.sql, target.quoted).encode()
        yield _note(connection, migration, target.quoted)
    yield from create(connection, target.quoted, rest)
    yield from note(connection, target.quoted, changes, target.known)


def _differences(target: _Target, applied: Applied, stored: Mapping[str, StoredFunction]) -> FunctionChanges:
    """Return what this code changes of the functions: nothing if newer code has migrated the tables."""
    if max(applied) > target.known:
        return FunctionChanges()
    oldest = max(one.works_with for one in applied.values())
    return compare(target.functions, stored, target.known, oldest)


def _named(changes: FunctionChanges) -> list[str]:
    if len(changes.replaced) > 1:
        return [f"{len(changes.replaced)} functions"]
    return [f"function {one.name}" for one in changes.replaced]


def _limits() -> bytes:
    return (
        f"set local lock_timeout = {LOCK_TIMEOUT_S * 1000:.0f}; "
        f"set local idle_in_transaction_session_timeout = {IDLE_TIMEOUT_S * 1000:.0f}"
    ).encode()


def _note(connection: Connection, migration: Migration, quoted: str) -> bytes:
    values = (migration.number, migration.name, migration.digest, migration.works_with, VERSION)
    listed = sql.SQL("({})").format(sql.SQL(", ").join(sql.Literal(value) for value in values))
    return in_schema(_NOTE, quoted).encode() + listed.as_bytes(connection)


def _applied(connection: ManagedConnection, quoted: str) -> Applied:
    return _of_rows(connection.ask(in_schema(_APPLIED, quoted).encode()))


def _of_rows(rows: Sequence[Row]) -> Applied:
    return {number: AppliedMigration(digest, works_with, version) for number, digest, works_with, version in rows}


def _stored(ask: Callable[[bytes], list[Row]], quoted: str, applied: Applied) -> dict[str, StoredFunction]:
    """Return the functions that are in place. Their table is made by the first migration."""
    rows = ask(in_schema(READ, quoted).encode()) if applied else []
    return {name: StoredFunction(digest, signature, number) for name, digest, signature, number in rows}


@contextmanager
def _transaction(target: _Target) -> Iterator[Connection]:
    """Yield the connection in a transaction that allows one `migrate` at a time.

    The lock is taken anew for each transaction and given back by its commit: a pooler may change the session in
    between."""
    with target.lane.transaction(patient=True) as connection, target.blockers.watched(_backend(connection)):
        key = zlib.crc32(target.schema.encode()) - 2**31
        connection.execute(f"set local lock_timeout = {OTHERS_TIMEOUT_S * 1000:.0f}".encode())
        connection.execute("select pg_advisory_xact_lock(%s, %s)", (_LOCK_CLASS, key))
        yield connection


def _backend(connection: Connection) -> int:
    # Behind a pooler the session is known only inside the transaction.
    return int(str(_one(connection, "select pg_backend_pid()", ())))


def _one(connection: Connection, query: str, values: tuple[object, ...]) -> object:
    row = connection.execute(query.encode(), values).fetchone()
    assert row is not None
    return row[0]
