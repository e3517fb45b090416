"""The connections of one PostgreSQL ledger, one per purpose, and its queries."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import psycopg

from unstuck.config import Settings
from unstuck.errors import LedgerReplaced
from unstuck.ledger.postgres.connect import Session, bounds_of, read_address
from unstuck.ledger.postgres.connection import ManagedConnection, Row
from unstuck.ledger.postgres.notifier import Notifier
from unstuck.ledger.postgres.prepared import REPEATED
from unstuck.ledger.sql import load_queries

QUERY_FILES = (
    "jobs.sql",
    "workers.sql",
    "recovery.sql",
    "diagnosis.sql",
    "events.sql",
    "admin.sql",
    "queues.sql",
    "schedules.sql",
    "workflows.sql",
)
PACKAGE = "unstuck.ledger.postgres.queries"


class Database:
    """Every part of the ledger has this, and uses the connection that its purpose names.

    `turn` carries turns alone, so that nothing delays them. `service` carries heartbeats, wake-ups and the reaper; its
    session is the worker's proof of life. `client` carries enqueues, `read` what people ask, `bell` the wake-ups sent
    by processes that are not workers, `beats` the heartbeats of remote workers, so that they wait for nothing that a
    page asks. Each is opened on first use: a worker has two, a client two or three.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.schema = settings.schema
        self.quoted_schema = f'"{settings.schema}"'
        self.address = read_address(settings.url)
        queries = load_queries(PACKAGE, *QUERY_FILES, schema=self.quoted_schema)
        self.sql: Mapping[str, bytes] = {name: text.encode() for name, text in queries.items()}
        self.turn_connection = self.new_connection("turn")
        self.service_connection = self.new_connection("service")
        self.client_connection = self.new_connection("client")
        self.read_connection = self.new_connection("read")
        self.wakeup_connection = self.new_connection("bell")
        self.heartbeat_connection = self.new_connection("beats")
        self.listen_connection = self.new_connection("listen", settings.listen_url) if settings.listen_url else None
        self.wakeups = Notifier(self.sql["ring"], self.schema)
        self.worker_id: str | None = None
        """The worker that was registered here, if any: its service session is stamped whenever it reconnects."""
        for connection in (self.turn_connection, self.service_connection, self.client_connection):
            connection.prepare(self.sql[name] for name in REPEATED)
        self.worker_queues: frozenset[str] = frozenset()
        self.known_ledger: str | None = None
        """Which ledger this is, once it was seen: no other is taken for it from then on."""
        for connection in self.connections():
            if connection is not self.listen_connection:
                connection.on_open(self._recognise)
        self._numbered_on: str | None = None
        for connection in (
            self.turn_connection,
            self.service_connection,
            self.client_connection,
            self.heartbeat_connection,
        ):
            connection.on_open(partial(self._skip_lost_numbers, connection))
        self.service_connection.on_open(self._stamp)
        self.service_connection.on_open(self._follow_primary)

    def new_connection(self, purpose: str, url: str | None = None) -> ManagedConnection:
        address = self.address if url is None else read_address(url)
        return ManagedConnection(purpose, address, self.schema, bounds_of(purpose, self.settings))

    def connections(self) -> list[ManagedConnection]:
        connections = [
            self.turn_connection,
            self.service_connection,
            self.client_connection,
            self.read_connection,
            self.wakeup_connection,
            self.heartbeat_connection,
        ]
        return connections if self.listen_connection is None else [*connections, self.listen_connection]

    def read(self, name: str, /, **values: Any) -> list[Row]:
        return self.read_connection.ask(self.sql[name], values)

    def serve(self, name: str, /, **values: Any) -> list[Row]:
        """Ask on the service connection, for what is the same when done twice."""
        return self.service_connection.ask(self.sql[name], values)

    def serve_once(self, name: str, /, **values: Any) -> list[Row]:
        """Write on the service connection, for what is not."""
        return self.service_connection.write(self.sql[name], values)

    def notify(self, words: Iterable[str]) -> None:
        """Wake the listeners that these words concern, as `Ledger.notify` says."""
        if self.settings.notify:
            # A worker notifies on the connection that it has anyway, any other process on one of its own.
            self.wakeups.notify(
                words, self.service_connection if self.worker_id is not None else self.wakeup_connection
            )

    def _follow_primary(self, session: Session) -> None:
        """Take the other connections along to the server that answers now: this one has the shortest deadline."""
        if not session.pooled:
            for connection in self.connections():
                if connection is not self.service_connection:
                    connection.leave_other_servers(session.server)

    def _recognise(self, session: Session) -> None:
        """Learn which ledger is behind the URL, or raise LedgerReplaced if it is another one than before."""
        try:
            rows = session.connection.execute(self.sql["ledger_id"]).fetchall()
        except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn, psycopg.errors.InvalidSchemaName):
            rows = []  # No tables yet.
        except psycopg.errors.InsufficientPrivilege:
            return  # The statement that follows says so, with the cure.
        found = str(rows[0][0]) if rows else None
        if self.known_ledger is None:
            self.known_ledger = found
        elif found != self.known_ledger:
            holds = f"There is another ledger ({found})" if found else "There is no ledger any more"
            raise LedgerReplaced(
                f"{holds} in schema {self.schema!r} of {self.address.where}: this process works with "
                f"{self.known_ledger}, and with no other ledger. Point the URL at the right database, and everything "
                "goes on; or restart what uses it."
            )

    def _skip_lost_numbers(self, connection: ManagedConnection, session: Session) -> None:
        """After a failover give out no number that the lost primary may have given out; once per run of a server.

        Behind a pooler the server may be another one at any call, so every call asks."""
        connection.asks_first = ()
        if session.server == self._numbered_on and not session.pooled:
            return
        try:
            session.connection.execute(self.sql["skip_lost_numbers"])
        except (
            psycopg.errors.UndefinedFunction,
            psycopg.errors.InvalidSchemaName,
            psycopg.errors.InsufficientPrivilege,
        ):
            return  # There is no ledger yet, or this role gives out no numbers.
        self._numbered_on = session.server
        if session.pooled and connection is not self.heartbeat_connection:
            connection.asks_first = ((self.sql["skip_lost_numbers"], {}),)

    def _stamp(self, session: Session) -> None:
        if self.worker_id is not None:
            values = {"worker_id": self.worker_id, **session_values(session)}
            session.connection.execute(self.sql["stamp_session"], values)


def session_values(session: Session) -> dict[str, Any]:
    """Give the session as evidence; none behind a pooler, whose sessions prove nothing."""
    if session.pooled:
        return {"session_pid": None, "session_start": None, "session_server": None}
    return {"session_pid": session.pid, "session_start": session.started, "session_server": session.server}
