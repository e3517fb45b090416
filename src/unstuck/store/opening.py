"""Open the ledger that a URL names."""

from unstuck.config import Settings
from unstuck.domain.errors import SchemaMismatch
from unstuck.store.contract import Ledger


def open_ledger(settings: Settings) -> Ledger:
    """Give the ledger; nothing is connected before its first use."""
    # Imported here so that a SQLite user never loads the PostgreSQL driver, and the other way round.
    if settings.url.startswith("sqlite:"):
        from unstuck.store.sqlite.ledger import SqliteLedger

        return SqliteLedger(settings)
    from unstuck.store.postgres.ledger import PostgresLedger

    return PostgresLedger(settings)


def ready_ledger(settings: Settings) -> Ledger:
    """Open the ledger and see that its tables fit this code, making them where that is allowed."""
    ledger = open_ledger(settings)
    try:
        ledger.check_schema()
    except SchemaMismatch:
        if not settings.auto_migrate:
            raise
        # Refuses by itself where the tables are newer than this code.
        ledger.migrate()
    return ledger
