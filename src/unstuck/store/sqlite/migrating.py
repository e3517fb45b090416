"""Bring the tables of a SQLite file up to date, and refuse those that are newer."""

import apsw

from unstuck import failpoints
from unstuck.store.migrations import Applied, check_applied, pending, read_migrations
from unstuck.store.sqlite.database import Database

MIGRATIONS = read_migrations("unstuck.store.sqlite.migrations")
LIMIT_S = 600.0
"""A migration may keep the write lock for so long before others take it for frozen."""


def migrate(db: Database) -> list[str]:
    """Apply what is missing, each file in a transaction of its own, and give the names."""
    db.create()
    done: list[str] = []
    while True:
        # What is missing is read inside the transaction that applies it: of two at once, one finds it done.
        with db.write(LIMIT_S) as cursor:
            cursor.execute(
                "CREATE TABLE IF NOT EXISTS unstuck_migrations "
                "(number INTEGER PRIMARY KEY, name TEXT NOT NULL, applied_at REAL NOT NULL, digest TEXT) STRICT"
            )
            left = pending(MIGRATIONS, _applied(cursor), str(db.path))
            if not left:
                return done
            for _ in cursor.execute(left[0].sql):
                pass
            cursor.execute(
                "INSERT INTO unstuck_migrations VALUES (?, ?, unixepoch('subsec'), ?)",
                (left[0].number, left[0].name, left[0].digest),
            )
            if failpoints.active:
                failpoints.reached("migrate.before_commit")
        done.append(left[0].name)
        if failpoints.active:
            failpoints.reached("migrate.between")


def check(db: Database) -> None:
    """Raise SchemaMismatch, naming the cure, unless the tables fit this code."""
    with db.read() as cursor:
        try:
            applied = _applied(cursor)
        except apsw.SQLError:
            applied = {}
    check_applied(MIGRATIONS, applied, str(db.path))


def _applied(cursor: apsw.Cursor) -> Applied:
    try:
        return dict(cursor.execute("SELECT number, digest FROM unstuck_migrations"))
    except apsw.SQLError:
        # Digests were not always kept.
        return {number: None for (number,) in cursor.execute("SELECT number FROM unstuck_migrations")}
