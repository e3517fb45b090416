"""Translate SQLite's errors into the ledger's, once, each with its cure."""

import errno

import apsw

from unstuck.errors import LedgerBusy, LedgerError, LedgerUnavailable, RefusedValue, SchemaMismatch, UncertainCommit
from unstuck.ledger.migrate import CURE_OLD

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_SYNC_FAILED = frozenset({apsw.SQLITE_IOERR_FSYNC, apsw.SQLITE_IOERR_DIR_FSYNC})


def translate(error: Exception, path: str, *, system_errno: int = 0, committing: bool = False) -> Exception:
    """Give what the caller should see; an error that is not the database's comes back as it is."""
    extended = getattr(error, "extendedresult", 0)
    match error:
        case apsw.BusyError() | apsw.LockedError() | apsw.ProtocolError():
            return locked(path)
        case apsw.FullError():
            return _full(path)
        case apsw.IOError() if system_errno in _NO_SPACE:
            return _full(path)
        case apsw.IOError() if committing and extended in _SYNC_FAILED:
            return UncertainCommit(
                f"The disk did not confirm a write to {path} ({error}): it may or may not be stored. "
                "Check the disk; the write is repeated."
            )
        case apsw.ReadOnlyError() | apsw.PermissionsError() | apsw.AuthError():
            return LedgerError(
                f"{path} cannot be written ({error}). Give this user write access to the file and its directory."
            )
        case apsw.CantOpenError():
            return LedgerError(
                f"{path} cannot be opened ({error}). Check that its directory exists, and that this user may read and "
                "write both."
            )
        case apsw.NotADBError():
            return LedgerError(
                f"{path} is not a SQLite database. Point the URL at another file, or move this one out of the way."
            )
        case apsw.CorruptError():
            return LedgerError(
                f"{path} is damaged ({error}). Stop every worker, restore a backup and run `unstuck migrate`, "
                "or save what can be read with `sqlite3 FILE .recover`."
            )
        case apsw.IOError():
            return LedgerUnavailable(f"{path} cannot be read or written ({error}). Check the disk it is on.")
        case apsw.ConstraintError() | apsw.MismatchError() | apsw.TooBigError():
            return RefusedValue(f"{path} refused a value ({error}). Send the others without it.")
        case UnicodeEncodeError():
            return RefusedValue(
                f"A lone surrogate is no text and cannot be stored ({error.reason}). Decode the text properly first."
            )
        case OverflowError():
            return RefusedValue(f"A number is too large to be stored ({error}). Whole numbers may have 64 bits.")
        case apsw.SQLError() if "no such table" in str(error) or "no such column" in str(error):
            return SchemaMismatch(f"There is no ledger in {path} yet, or an old one ({error}). {CURE_OLD}")
        case apsw.SQLError() if "already exists" in str(error) or "there is already" in str(error):
            return LedgerError(
                f"{path} has something of yours under a name that the ledger needs ({error}): rename it, or give the "
                "ledger a file of its own."
            )
        case apsw.Error():
            return LedgerError(f"{path}: SQLite says {error}. If it stays, run `unstuck migrate` and restart.")
        case _:
            return error


def locked(path: str) -> LedgerBusy:
    return LedgerBusy(
        f"{path} is locked by someone else who has a write under way. Close whatever has the file open "
        "(a database browser, a backup, a stopped process), or try again."
    )


def _full(path: str) -> LedgerUnavailable:
    return LedgerUnavailable(
        f"The disk of {path} is full (or a quota or a file size limit was reached). Free some space and try again."
    )


def refuse_nul(*texts: str | None) -> None:
    """Refuse a NUL character in text, as PostgreSQL would: a ledger must be able to move."""
    for text in texts:
        if text is not None and "\0" in text:
            raise RefusedValue("Text with a NUL character cannot be stored. Remove it, or pass the value as base64.")
