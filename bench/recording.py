"""A PostgreSQL ledger that writes down which statements it sends, and these as a `pgbench` script has them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from unstuck.ledger.postgres.connect import Address, Bounds, bounds_of, read_address
from unstuck.ledger.postgres.connection import ManagedConnection, Row
from unstuck.ledger.postgres.ledger import PostgresLedger

OWN = ("worker_id", "host", "session_pid", "session_start")
"""Values that each worker has of its own. A script has variables of these names."""


@dataclass(frozen=True)
class Sent:
    """One statement with its values."""

    query: bytes
    values: Mapping[str, Any]


class RecordingLane(ManagedConnection):
    def __init__(self, purpose: str, address: Address, schema: str, bounds: Bounds) -> None:
        super().__init__(purpose, address, schema, bounds)
        self.sent: list[Sent] = []

    def ask(self, query: bytes, values: Mapping[str, Any] | None = None) -> list[Row]:
        self.sent.append(Sent(query, values or {}))
        return super().ask(query, values)

    def write(self, query: bytes, values: Mapping[str, Any] | None = None) -> list[Row]:
        self.sent.append(Sent(query, values or {}))
        return super().write(query, values)


class RecordingLedger(PostgresLedger):
    """The real one; whatever uses it sends what it always sends."""

    def recorded(self, act: Callable[[], object]) -> list[str]:
        """Do it, and give what it sent, as text for a script."""
        sent: list[Sent] = []
        for lane in self.connections():
            assert isinstance(lane, RecordingLane)
            lane.sent = sent
        act()
        return [self._scripted(one) for one in sent]

    def _connection(self, purpose: str, url: str | None = None) -> ManagedConnection:
        address = self.address if url is None else read_address(url)
        return RecordingLane(purpose, address, self.schema, bounds_of(purpose, self.settings))

    def _scripted(self, sent: Sent) -> str:
        query = sent.query.decode()
        for name, value in sent.values.items():
            own = name in OWN and value is not None
            query = query.replace(f"%({name})s", f":{name}" if own else self._literal(value))
        return query.replace("%%", "%")

    def _literal(self, value: Any) -> str:
        """Have the server write it: the ledger's arrays are bytes that only it can read."""
        if value is None or isinstance(value, int | float):
            return "null" if value is None else str(value).lower()
        connection = self.read_connection.open().connection
        row = connection.execute("select quote_literal(%(v)s), pg_typeof(%(v)s)::text", {"v": value}).fetchone()
        assert row is not None
        # A string has no type of its own in the driver's hands either; arrays have.
        return str(row[0]) if isinstance(value, str) else f"{row[0]}::{row[1]}"
