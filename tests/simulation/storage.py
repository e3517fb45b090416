"""Give each run a ledger of its own, quickly: a copy of one that was migrated once."""

from functools import cache
from typing import Any

from unstuck.config import IN_MEMORY, Recovery, Settings
from unstuck.store.sqlite.ledger import SqliteLedger


class SqliteStorage:
    """The real SQLite ledger, in memory."""

    def __init__(self, recovery: Recovery) -> None:
        self.ledger = SqliteLedger(Settings(url=IN_MEMORY, recovery=recovery))
        self.restore(_migrated())

    def save(self) -> bytes:
        with self.ledger.db.read() as cursor:
            saved: bytes = cursor.connection.serialize("main")
        return saved

    def restore(self, saved: Any) -> None:
        with self.ledger.db._alone() as connection:
            connection.deserialize("main", saved)

    def close(self) -> None:
        self.ledger.close()


@cache
def _migrated() -> bytes:
    ledger = SqliteLedger(Settings(url=IN_MEMORY))
    ledger.migrate()
    with ledger.db.read() as cursor:
        saved: bytes = cursor.connection.serialize("main")
    ledger.close()
    return saved
