"""Bring the tables of a SQLite file up to date, and refuse those that no longer work with this code."""

from collections.abc import Sequence

import apsw

from unstuck import failpoints
from unstuck.errors import LedgerBusy
from unstuck.ledger.migrate import (
    WAIT_S,
    Applied,
    AppliedMigration,
    LockWait,
    Migration,
    check_applied,
    pending,
    read_migrations,
)
from unstuck.ledger.sqlite.database import Database
from unstuck.ledger.sqlite.locks import describe_writer
from unstuck.version import VERSION

MIGRATIONS = read_migrations("unstuck.ledger.sqlite.schema")
LIMIT_S = 600.0
"""A migration may keep the write lock for so long before others take it for frozen."""
TRY_S = 0.25
"""How long one try waits for the write lock. Others are not held up by it: they take their turns in between."""

_TABLE = """
CREATE TABLE IF NOT EXISTS unstuck_migrations (
    number INTEGER PRIMARY KEY, name TEXT NOT NULL, applied_at REAL NOT NULL, digest TEXT NOT NULL,
    works_with INTEGER NOT NULL, version TEXT NOT NULL) STRICT
"""
_NOTE = """
INSERT INTO unstuck_migrations (number, name, applied_at, digest, works_with, version)
VALUES (?, ?, unixepoch('subsec'), ?, ?, ?)
"""


def migrate(db: Database, migrations: Sequence[Migration] = MIGRATIONS, wait_s: float = WAIT_S) -> list[str]:
    """Apply what is missing, each file in a transaction of its own, and return the names."""
    db.create()
    wait = LockWait(wait_s)
    done: list[str] = []
    while True:
        try:
            applied = _apply_next(db, migrations, min(TRY_S, wait.left_s()))
        except LedgerBusy:
            name = f"The migration of {db.path}"
            wait.pause(name, describe_writer(db.path), "End that transaction, or close the program.")
            continue
        if applied is None:
            return done
        done.append(applied)
        if failpoints.active:
            failpoints.reached("migrate.between")


def _apply_next(db: Database, migrations: Sequence[Migration], patience_s: float) -> str | None:
    # What is missing is read inside the transaction that applies it: of two at once, one finds it done.
    with db.write(LIMIT_S, patience_s=patience_s) as cursor:
        cursor.execute(_TABLE)
        left = pending(migrations, _applied(cursor), str(db.path))
        if not left:
            return None
        following = left[0]
        for _ in cursor.execute(following.sql):
            pass
        cursor.execute(_NOTE, (following.number, following.name, following.digest, following.works_with, VERSION))
        if failpoints.active:
            failpoints.reached("migrate.before_commit")
    return following.name


def check(db: Database) -> None:
    """Raise SchemaMismatch, naming the cure, unless this code works with the tables."""
    with db.read() as cursor:
        try:
            applied = _applied(cursor)
        except apsw.SQLError:
            applied = {}
    check_applied(MIGRATIONS, applied, str(db.path))


def _applied(cursor: apsw.Cursor) -> Applied:
    try:
        rows = list(cursor.execute("SELECT number, digest, works_with, version FROM unstuck_migrations"))
    except apsw.SQLError:
        # A table that lacks a column was made by a draft, and there is nothing to compare.
        numbers = cursor.execute("SELECT number FROM unstuck_migrations")
        rows = [(number, None, number, "?") for (number,) in numbers]
    return {number: AppliedMigration(digest, works_with, version) for number, digest, works_with, version in rows}
