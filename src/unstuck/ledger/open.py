"""Open the ledger that a URL names."""

from unstuck.config import Settings
from unstuck.errors import NoLedger, SchemaMismatch
from unstuck.ledger.contract import Ledger

EXPECTED_LEDGER = "UNSTUCK_EXPECTED_LEDGER"
"""In the environment of what `unstuck up` starts: the id of its ledger. A replacement must not begin another one."""


def open_ledger(settings: Settings) -> Ledger:
    """Give the ledger; nothing is connected before its first use."""
    # Imported here so that a SQLite user never loads the PostgreSQL driver, and the other way round.
    if settings.url.startswith("sqlite:"):
        from unstuck.ledger.sqlite.ledger import SqliteLedger

        return SqliteLedger(settings)
    from unstuck.ledger.postgres.ledger import PostgresLedger

    return PostgresLedger(settings)


def ready_ledger(settings: Settings, expected: str | None = None) -> Ledger:
    """Open the ledger and see that its tables fit this code, making them where that is allowed.

    With `expected` only the ledger with that id will do, and none is made."""
    ledger = open_ledger(settings)
    if expected is not None:
        ledger.expect(expected)
    try:
        ledger.check_schema()
    except SchemaMismatch as error:
        if not settings.auto_migrate or (expected is not None and isinstance(error, NoLedger)):
            raise
        # Refuses by itself where the tables are newer than this code.
        ledger.migrate()
    return ledger
