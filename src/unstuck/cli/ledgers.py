"""Open the ledger for a command: reading never creates one, and trouble is told with its cure."""

from unstuck.config import Settings, sqlite_file
from unstuck.domain.errors import LedgerUnavailable
from unstuck.store.contract import Ledger
from unstuck.store.opening import open_ledger, ready_ledger
from unstuck.store.sqlite.database import refuse_vanished


def open_existing(settings: Settings) -> Ledger:
    """Open a ledger whose tables are there and fit this code."""
    path = sqlite_file(settings.url)
    if path is not None and not path.exists():
        refuse_vanished(path)
        raise LedgerUnavailable(
            f"There is no ledger at {path}. Start a worker, enqueue a job or run `unstuck migrate` to make one, "
            "or name another with --url, --app or $UNSTUCK_URL."
        )
    ledger = open_ledger(settings)
    try:
        ledger.check_schema()
    except BaseException:
        ledger.close()
        raise
    return ledger


def open_or_create(settings: Settings) -> Ledger:
    """Open a ledger, making or updating its tables where the settings allow it."""
    return ready_ledger(settings)
