"""Send a statement and take in its answer later, for an event loop: it must not wait, and a thread would cost more."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

import psycopg
from psycopg.pq import ExecStatus, Format
from psycopg.pq.abc import PGresult

from unstuck.errors import LedgerUnavailable
from unstuck.ledger.postgres.arrays import Array, oid_of
from unstuck.ledger.postgres.connect import Session
from unstuck.ledger.postgres.connection import ManagedConnection

Texts = tuple[bytes | None, ...]
"""The columns of a row as text."""
T = TypeVar("T")


class HeartbeatPipeline(Generic[T]):
    """One statement under way. Its connection is its own until it has landed or is dropped; whatever goes wrong with it
    is no error of the caller's, who has the statement done in the usual way then."""

    def __init__(self, connection: ManagedConnection, session: Session, read: Callable[[list[Texts]], T]) -> None:
        self._connection = connection
        self._session = session
        self._read = read
        self._results: list[PGresult] = []
        self._is_down = False
        self.fd = session.connection.pgconn.socket
        self.limit_s = connection.bounds.answer_s
        self.unsent = False
        """Some of it is still here: `push` when the socket can be written."""

    def send(self, query: bytes, values: Sequence[Array]) -> None:
        pgconn = self._session.connection.pgconn
        # As the driver has all of its connections; else a network that stands still would stop whoever sends.
        pgconn.nonblocking = 1
        types, formats = [oid_of(value) for value in values], [Format.BINARY] * len(values)
        pgconn.send_query_params(query, values, types, formats, Format.TEXT)
        self.push()

    def push(self) -> None:
        self.unsent = bool(self._session.connection.pgconn.flush())

    def land(self) -> T | None:
        """Take in what has come; None while that is not all of it."""
        pgconn = self._session.connection.pgconn
        pgconn.consume_input()
        while not pgconn.is_busy():
            result = pgconn.get_result()
            if result is not None:
                self._results.append(result)
                continue
            self._is_down = True
            self._connection.give_back(self._session)
            return self._read(self._rows())
        return None

    def drop(self) -> None:
        """Give it up; nobody knows whether it was done. One that was refused has landed, and its connection is the
        lane's again."""
        if self._is_down:
            return
        with suppress(psycopg.Error):
            self._session.connection.close()

    def _rows(self) -> list[Texts]:
        rows: list[Texts] = []
        for result in self._results:
            if result.status != ExecStatus.TUPLES_OK:
                raise LedgerUnavailable(result.error_message.decode("utf-8", "replace"))
            rows += [
                tuple(result.get_value(row, column) for column in range(result.nfields))
                for row in range(result.ntuples)
            ]
        return rows


def launch(
    connection: ManagedConnection, query: bytes, values: Sequence[Array], read: Callable[[list[Texts]], T]
) -> HeartbeatPipeline[T] | None:
    """Send a statement with places $1, $2, …; None where there is no connection that is free and well."""
    session = connection.lend()
    if session is None:
        return None
    flight = HeartbeatPipeline(connection, session, read)
    try:
        flight.send(query, values)
    except psycopg.Error:
        flight.drop()
        return None
    return flight
