"""Find the psycopg connection inside whatever a caller gives as `connection=`."""

from collections.abc import Iterable
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from unstuck.domain.errors import LedgerError

_TAKES = "connection= takes a psycopg.Connection, or a SQLAlchemy Connection or Session on postgresql+psycopg"
_NOT_ASYNC = (
    "asyncio connections are not supported yet, not even through run_sync. Run the transaction with a sync Session "
    "in a thread (await asyncio.to_thread(…)), or enqueue after your own commit (await task.enqueue_async(…))."
)
_SAME_BYTES = ("utf-8", "ascii")


def driver_connection(connection: Any) -> psycopg.Connection[Any]:
    """Give the driver's connection with a transaction open that the caller will commit."""
    found = connection
    if not isinstance(found, psycopg.Connection):
        found = _of_sqlalchemy(connection)
    if found.closed:
        raise LedgerError("The given connection is closed. Open it, or leave connection= out.")
    if found.autocommit and found.info.transaction_status == TransactionStatus.IDLE:
        raise LedgerError(
            "The given connection is in autocommit and has no transaction open, so there is nothing for the job to be "
            "part of. Begin one first (`with connection.transaction():`), or leave connection= out."
        )
    return found


def refuse_other_words(connection: psycopg.Connection[Any], texts: Iterable[str | None]) -> None:
    """Refuse text that the server would take for something else: we send UTF-8, whatever the caller chose."""
    encoding = connection.info.encoding
    if encoding in _SAME_BYTES or all(text is None or text.isascii() for text in texts):
        return
    raise LedgerError(
        f"The given connection speaks {encoding}, in which this job's text would be stored as other words. Open it "
        "with client_encoding=UTF8, or leave connection= out."
    )


def _of_sqlalchemy(given: Any) -> psycopg.Connection[Any]:
    kind = type(given)
    if isinstance(given, psycopg.AsyncConnection):
        raise LedgerError(f"{_TAKES}; {_NOT_ASYNC}")
    if kind.__module__.partition(".")[0] != "sqlalchemy":
        raise LedgerError(f"{_TAKES}; not {kind.__module__}.{kind.__qualname__}.")
    if hasattr(given, "sync_session") or hasattr(given, "sync_connection"):
        raise LedgerError(f"{_TAKES}; {_NOT_ASYNC}")
    if not hasattr(given, "in_transaction"):
        raise LedgerError(f"{_TAKES}; not {kind.__module__}.{kind.__qualname__}.")
    engine = given.get_bind() if callable(getattr(given, "get_bind", None)) else given
    if getattr(engine.dialect, "is_async", False):
        raise LedgerError(f"{_TAKES}; {_NOT_ASYNC}")
    # A Session knows its Connection, and asking for it begins the Session's transaction.
    connection = given.connection() if callable(getattr(given, "connection", None)) else given
    if not connection.in_transaction():
        # SQLAlchemy begins by itself when it executes; we go past it, so it must be told, or its commit does nothing.
        connection.begin()
    found = connection.connection.driver_connection
    if not isinstance(found, psycopg.Connection):
        module = type(found).__module__.partition(".")[0]
        raise LedgerError(f"{_TAKES}; this one is on {module}. Use a postgresql+psycopg:// engine.")
    return found
