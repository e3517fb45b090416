"""Give each run a ledger of its own, quickly: one that was migrated once is emptied after each run."""

import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from graphlib import TopologicalSorter
from typing import Any

import apsw
from tests.simulation.clock import Machine

from unstuck.config import IN_MEMORY, Recovery, Settings
from unstuck.domain.watch import Change, Period, Tick, advance
from unstuck.store.sqlite import reaper
from unstuck.store.sqlite.ledger import SqliteLedger
from unstuck.store.sqlite.upkeep import first_after_restore
from unstuck.store.sqlite.verbs import SQL

_spare: list[apsw.Connection] = []
"""Connections to a ledger as it is after its migration. Each knows its schema and its statements already."""


class SqliteStorage:
    """The real SQLite ledger, in memory."""

    def __init__(self, recovery: Recovery) -> None:
        self.ledger = SqliteLedger(Settings(url=IN_MEMORY, recovery=recovery))
        self._restored = False
        if _spare:
            self.ledger.db._writer = _spare.pop()
        else:
            self._load(_migrated())

    def notice_failovers(self, is_same: Callable[[], bool]) -> None:
        """Let ticks notice that another server answers, which happens to no file."""

        def advance_here(last: Period | None, now: float, tick: Tick) -> Change:
            return advance(last, now, tick, same_server=is_same())

        reaper.advance = advance_here  # type: ignore[assignment]

    def set_time(self, machine: Machine, incarnation: int) -> None:
        """Do nothing: it reads the clocks of the simulation itself."""

    def save(self) -> bytes:
        with self.ledger.db.read() as cursor:
            saved: bytes = cursor.connection.serialize("main")
        return saved

    def restore(self, saved: Any) -> None:
        self._restored = True
        self._load(saved)

    def skip_lost_numbers(self) -> None:
        """Do what PostgreSQL does in its function of this name."""
        with self.ledger.db.write() as cursor:
            job_id, token = cursor.execute(SQL["last_numbers"]).get
            now = time.time()
            cursor.execute(SQL["set_last_numbers"], (first_after_restore(job_id, now), first_after_restore(token, now)))

    def close(self) -> None:
        """Empty the ledger for the next run; or close it, if something of it was left in an unknown state."""
        connection, self.ledger.db._writer = self.ledger.db._writer, None
        self.ledger.close()
        if connection is None:
            return
        with suppress(apsw.Error):
            if not self._restored and not connection.in_transaction:
                _empty(connection)
                _spare.append(connection)
                return
        connection.close(force=True)

    def _load(self, saved: bytes) -> None:
        with self.ledger.db.read() as cursor:
            cursor.connection.deserialize("main", saved)


def _empty(connection: apsw.Connection) -> None:
    """Bring back the state right after the migration: no query depends on where rows are on which page."""
    with connection:
        for table in _first_rows():
            if connection.execute(f"SELECT 1 FROM {table} LIMIT 1").get is not None:
                connection.execute(f"DELETE FROM {table}")
        for table, rows in _first_rows().items():
            for row in rows:
                connection.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)


@cache
def _first_rows() -> dict[str, list[tuple[Any, ...]]]:
    """Return the rows of each table after the migration, each before those that it refers to.

    So no pragma is needed to empty them: to set one has every statement compiled again."""
    connection = apsw.Connection(":memory:")
    connection.deserialize("main", _migrated())
    names = [name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
    parents = {name: {row[2] for row in connection.execute(f"PRAGMA foreign_key_list({name})")} for name in names}
    order = list(TopologicalSorter(parents).static_order())
    rows = {table: connection.execute(f"SELECT * FROM {table}").fetchall() for table in reversed(order)}
    connection.close()
    return rows


@cache
def _migrated() -> bytes:
    ledger = SqliteLedger(Settings(url=IN_MEMORY))
    ledger.migrate()
    with ledger.db.read() as cursor:
        saved: bytes = cursor.connection.serialize("main")
    ledger.close()
    return saved
