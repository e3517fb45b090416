"""Keep a ledger in the memory of this process: as fast as it gets, and gone with the process.

There is one connection, and one thread at a time uses it, to write or to read, in the order in which they came. A
second connection would need SQLite's shared cache, in which readers and writers lock each other's tables out.
"""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import apsw

from unstuck.errors import LedgerError
from unstuck.ledger.sqlite.database import PATIENCE_S, Database, connect
from unstuck.ledger.sqlite.errors import locked
from unstuck.ledger.sqlite.lock import Turnstile

NAME = ":memory:"


class MemoryDatabase(Database):
    """Like a file, for the threads of one process. Whatever was written is lost when it is closed."""

    def __init__(self, *, kill_after_s: float, patience_s: float = PATIENCE_S) -> None:
        # No such file is ever made. The name is its own: bells are named after it.
        super().__init__(Path(f"{NAME}{secrets.token_hex(8)}"), kill_after_s=kill_after_s, patience_s=patience_s)
        self._turnstile = Turnstile()
        self._closed = ""

    @contextmanager
    def write(
        self, limit_s: float = 0.0, *, durable: bool = True, patience_s: float | None = None
    ) -> Iterator[apsw.Cursor]:
        connection = self._enter()
        try:
            connection.execute("BEGIN IMMEDIATE")
            yield from self._transact(connection)
        finally:
            self._turnstile.release()

    @contextmanager
    def read(self) -> Iterator[apsw.Cursor]:
        connection = self._enter()
        try:
            cursor = connection.cursor()
            try:
                yield cursor
            except Exception as error:
                translated = self._translate(error, connection)
                if translated is error:
                    raise
                raise translated from error
            finally:
                cursor.close()
        finally:
            self._turnstile.release()

    def create(self) -> None:
        """Nothing is to be made: it is there when it is first used."""

    def close(self) -> None:
        """Forget all of it, for good."""
        if not self._closed:
            self._enter()
            try:
                self._closed = "This ledger was in memory and is closed: what it held is gone. Open a new one."
                self._drop_writer()
            finally:
                self._turnstile.release()

    def before_fork(self) -> None:
        """There is no file whose locks a child could break."""

    def after_fork_in_parent(self) -> None: ...

    def after_fork_in_child(self) -> None:
        self._closed = (
            "This ledger is in the memory of another process, from which this one was forked. Use a file, "
            "sqlite:///unstuck.db, for what several processes share."
        )
        # Somebody may have been inside SQLite at the moment of the fork, and is not here to leave it.
        self._abandon_connections()

    def _enter(self) -> apsw.Connection:
        """Wait until no other thread uses the connection; the caller releases the turnstile."""
        if self._closed:
            raise LedgerError(self._closed)
        if not self._turnstile.acquire(self.patience_s):
            raise locked(NAME)
        try:
            if self._closed:
                raise LedgerError(self._closed)
            if self._writer is None:
                self._writer = connect(NAME)
        except BaseException:
            self._turnstile.release()
            raise
        return self._writer
