"""Translate the driver's errors, once, into ours: what happened, to whom, and the cure."""

import psycopg

from unstuck.errors import (
    DuplicateJob,
    LedgerBusy,
    LedgerError,
    LedgerStandby,
    LedgerUnavailable,
    RefusedValue,
    SchemaMismatch,
    UncertainCommit,
)
from unstuck.ledger.migrate import CURE_OLD

MAX_REASON_CHARS = 300
LOCK_TIMEOUT = "55P03"
STATEMENT_TIMEOUT = "57014"
"""Or somebody cancelled the statement."""
DUPLICATE = "UQ001"
"""Our own, from `refuse_duplicate`: another job has the unique key."""

_CONNECT_CURES = (
    ("password authentication failed", "Check user and password in the URL."),
    ("no password supplied", "Put the password into the URL, PGPASSWORD or ~/.pgpass."),
    ("no pg_hba.conf entry", "Allow this host and user in the server's pg_hba.conf."),
    ("role", "Create the role (createuser), or name another user in the URL."),
    ("database", "Create it (createdb), or name another database in the URL."),
)
_STANDBY = "server is in hot standby mode"
_FULL = ("too many clients", "too many connections", "remaining connection slots")
_BUSY = (*_FULL, "starting up", "shutting down", "recovery mode")


class NoSlotLeft(LedgerUnavailable):
    """The server has as many connections as it allows."""


def connect_error(error: psycopg.Error, where: str) -> LedgerError:
    """Say why no connection could be opened."""
    reason = _reason(error)
    lower = reason.lower()
    if _STANDBY in str(error).lower():
        # Of several hosts each has a line of its own.
        return standby_error(where)
    if any(words in lower for words in _BUSY):
        kind = NoSlotLeft if any(words in lower for words in _FULL) else LedgerUnavailable
        return kind(
            f"PostgreSQL at {where} takes no connection just now: {reason}. Try again, or raise max_connections."
        )
    for words, cure in _CONNECT_CURES:
        if words in lower and ("does not exist" in lower or words not in ("role", "database")):
            return LedgerError(f"PostgreSQL at {where} refused the connection: {reason}. {cure}")
    return LedgerUnavailable(
        f"PostgreSQL at {where} cannot be reached: {reason}. Check that the server runs and that the URL names its "
        "host and port."
    )


def standby_error(where: str) -> LedgerStandby:
    """Return the error for a server in recovery: what it knows may be old, and it cannot be written to."""
    if "," in where:
        return LedgerStandby(
            f"Of the PostgreSQL servers at {where} only a standby (in recovery) answers. Unstuck talks to the primary "
            "only and waits until the primary is back or a standby is promoted."
        )
    return LedgerStandby(
        f"PostgreSQL at {where} is a standby (in recovery). Unstuck talks to the primary only and waits until this "
        "server is promoted. List all servers in the URL (postgresql://a,b/database) to find the primary at once."
    )


def lost_error(error: BaseException, where: str, *, uncertain: bool) -> LedgerUnavailable:
    """Say that the connection broke in the middle."""
    if uncertain:
        return UncertainCommit(
            f"The connection to PostgreSQL at {where} broke during a write, which may or may not have happened: "
            f"{_reason(error)}. Look again before repeating it."
        )
    return LedgerUnavailable(f"The connection to PostgreSQL at {where} broke: {_reason(error)}. Try again.")


def statement_error(error: psycopg.Error, where: str, schema: str) -> LedgerError:
    """Say why a statement was refused over a connection that still stands."""
    code = error.sqlstate or ""
    reason = _reason(error)
    if code == DUPLICATE:
        return DuplicateJob(int(error.diag.message_detail or 0))
    if code.startswith(("22", "54")) or isinstance(error, psycopg.DataError):
        return RefusedValue(f"PostgreSQL will not store a value of this batch: {reason}. Text must be free of NUL.")
    if code in ("42P01", "42883", "3F000", "42703"):
        # Also what a worker hears whose tables a newer version migrated under it.
        cure = f"{CURE_OLD} If a newer version has migrated it, upgrade Unstuck here."
        return SchemaMismatch(f"There is no fitting ledger in schema {schema!r} of {where}: {reason}. {cure}")
    if code == "42501":
        return LedgerError(
            f"This user may not use the ledger at {where}: {reason}. Grant it the rights on schema {schema!r}, or "
            "connect as its owner."
        )
    if code == "25006":
        return LedgerUnavailable(
            f"PostgreSQL at {where} is read-only (a standby?): {reason}. Point the URL at the primary."
        )
    if code == LOCK_TIMEOUT:
        return LedgerBusy(
            f"Another session of PostgreSQL at {where} held a lock for too long: {reason}. Nothing was written. Try "
            "again when its transaction has ended."
        )
    if code == "53100":
        return LedgerUnavailable(f"The disk of PostgreSQL at {where} is full: {reason}. Make room, then try again.")
    if code == STATEMENT_TIMEOUT:
        return LedgerBusy(
            f"PostgreSQL at {where} did not finish a statement in the time it had: {reason}. Nothing was written. Try "
            "again soon."
        )
    if code.startswith(("53", "40", "55", "57", "58", "08")):
        return LedgerUnavailable(f"PostgreSQL at {where} could not do it just now: {reason}. Try again.")
    return LedgerError(f"PostgreSQL at {where} refused a statement of the ledger: {reason} ({code or 'no code'}).")


def unreadable_url() -> LedgerError:
    # The driver's own message may quote a part of the password.
    return LedgerError(
        "The PostgreSQL URL cannot be read. Write postgresql://user:password@host:port/database, with special "
        "characters of the password percent-encoded and parameters (?sslmode=require) spelled as PostgreSQL does."
    )


def _reason(error: BaseException) -> str:
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return first.removesuffix(".")[:MAX_REASON_CHARS]


def unwritable_text(error: UnicodeEncodeError) -> RefusedValue:
    return RefusedValue(f"A text of this batch is not valid Unicode and cannot be stored: {error.reason}.")
