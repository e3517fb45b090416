"""Connections to the SQLite file, reads and writes, and what happens to them at a fork.

SQLite keeps its locks per process in memory that a child would inherit without the locks themselves. A
child that uses, opens again or even closes such a file can damage it. So nothing may be open at the
moment of a fork: the parent closes, forks, and both open again when they next need the file.
"""

import ctypes
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import apsw

from unstuck import failpoints
from unstuck.errors import LedgerError, LedgerReplaced, NoLedger
from unstuck.ledger.migrate import CURE_OLD
from unstuck.ledger.sql import load_queries
from unstuck.ledger.sqlite.errors import translate
from unstuck.ledger.sqlite.lock import FairLock, read_mark


class Forkable(Protocol):
    def before_fork(self) -> None: ...

    def after_fork_in_parent(self) -> None: ...

    def after_fork_in_child(self) -> None: ...


_known: "weakref.WeakSet[Forkable]" = weakref.WeakSet()
_forking: list[Forkable] = []
_guard = threading.Lock()


def watch_forks(thing: Forkable) -> None:
    with _guard:
        _known.add(thing)


def _before() -> None:
    with _guard:
        _forking[:] = list(_known)
    for thing in _forking:
        thing.before_fork()


def _in_parent() -> None:
    for thing in _forking:
        thing.after_fork_in_parent()
    _forking.clear()


def _in_child() -> None:
    global _guard
    _guard = threading.Lock()
    for thing in _forking:
        thing.after_fork_in_child()
    _forking.clear()


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)


PATIENCE_S = 30.0
BUSY_SLICE_S = 0.1
"""How long one try waits for a stranger's lock while it holds our own: short, since the others queue behind it."""
BUSY_PAUSE_S = 0.02
READ_BUSY_S = 1.0
FORK_PATIENCE_S = 5.0
CHECKPOINT_PAGES = 2_000
RESTART_PAGES = 20_000
"""Past this the checkpoint waits for readers to finish: a WAL that is never reset grows for ever."""
RESTART_BUSY_S = 0.5
WAL_KEPT_BYTES = 64 * 1024 * 1024
STATEMENTS_KEPT = 200
CACHE_KIB = 16_000


class Database:
    """One file: a writer connection and a reader connection, each used by one thread at a time."""

    def __init__(self, path: Path, *, kill_after_s: float, patience_s: float = PATIENCE_S) -> None:
        self.path = path
        self.patience_s = patience_s
        self.lock = FairLock(path.with_name(path.name + "-lock"), kill_after_s)
        self._writer: apsw.Connection | None = None
        self._reader: apsw.Connection | None = None
        self._writing = threading.Lock()
        self._reading = threading.Lock()
        self._identity: tuple[int, int] | None = None
        self.ledger_id: str | None = None
        """Which ledger this is, once it was seen: no other is taken for it from then on."""
        self._wal_pages = 0
        self._restart_from_pages = 0
        self._torn = False
        self._durable = True
        self._fork_locks: list[threading.Lock] = []
        watch_forks(self)

    # What the parts use -----------------------------------------------------------------------

    @contextmanager
    def write(
        self, limit_s: float = 0.0, *, durable: bool = True, patience_s: float | None = None
    ) -> Iterator[apsw.Cursor]:
        """Give a cursor inside a write transaction: committed at the end, rolled back on any error.

        What is not durable does not wait for the disk: a loss of power may forget it, as a whole. LedgerBusy if the
        lock is not free within `patience_s`."""
        deadline = time.monotonic() + (self.patience_s if patience_s is None else patience_s)
        self._must_exist()
        while True:
            self._acquire(deadline, limit_s)
            try:
                with self._writing:
                    connection = self._begin(durable)
                    if connection is not None:
                        yield from self._transact(connection)
                        return
            finally:
                self.lock.release()
            # A stranger writes without our lock. Let the others try too, and come back.
            if time.monotonic() >= deadline:
                raise translate(apsw.BusyError("busy"), str(self.path))
            time.sleep(BUSY_PAUSE_S)

    @contextmanager
    def read(self) -> Iterator[apsw.Cursor]:
        """Give a cursor for reading what is committed; it blocks nobody and is blocked by nobody."""
        self._must_exist()
        with self._reading:
            try:
                if self._reader is None:
                    self._reader = self._connect(READ_BUSY_S)
                cursor = self._reader.cursor()
                try:
                    yield cursor
                finally:
                    cursor.close()
            except Exception as error:
                translated = self._translate(error, self._reader)
                if translated is error:
                    raise
                self._drop_reader()
                raise translated from error

    def close(self) -> None:
        """Close both connections; the next use opens them again."""
        with self._writing, self._reading:
            self._close_connections()
        self.lock.close()

    # Opening ----------------------------------------------------------------------------------

    def create(self) -> None:
        """Make the file, readable by its owner only, unless it is there. LedgerReplaced if there was a ledger."""
        refuse_vanished(self.path, self.ledger_id)
        try:
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        except FileExistsError:
            # Never opened here: closing a plain descriptor of it would drop SQLite's locks of this process.
            pass
        except OSError as error:
            raise self._cannot_open(error) from error

    def _cannot_open(self, error: OSError) -> LedgerError:
        parent = self.path.parent
        if not parent.is_dir():
            return LedgerError(f"The directory {parent} does not exist. Create it, or use another path in the URL.")
        return LedgerError(
            f"{self.path} cannot be opened: {error.strerror}. Give this user write access to {parent}, "
            "or use another path in the URL."
        )

    def _must_exist(self) -> None:
        if self._torn:
            raise LedgerError(
                "This process was forked in the middle of a write. Open the ledger in the child before anything "
                "else uses it, or start the child afresh (spawn)."
            )
        try:
            found = os.stat(self.path)
        except FileNotFoundError as error:
            if not self.path.parent.is_dir():
                raise self._cannot_open(error) from error
            refuse_vanished(self.path, self.ledger_id)
            raise NoLedger(f"There is no ledger in {self.path} yet. {CURE_OLD}") from error
        except OSError as error:
            raise self._cannot_open(error) from error
        if self._identity is not None and self._identity != (found.st_dev, found.st_ino):
            self._leave_replaced()

    def _leave_replaced(self) -> None:
        """Drop connections to a file that is no longer the one at our path."""
        with self._writing, self._reading:
            # Not closed: SQLite would delete the -wal file of whatever is at the path now.
            self._abandon_connections()
            self._identity = None

    def _connect(self, busy_s: float) -> apsw.Connection:
        identity = self._identity_at_path()
        connection = connect(str(self.path), flags=apsw.SQLITE_OPEN_READWRITE)
        connection.set_busy_timeout(int(busy_s * 1000))
        connection.pragma("synchronous", "FULL")
        connection.pragma("cache_size", -CACHE_KIB)
        connection.pragma("journal_size_limit", WAL_KEPT_BYTES)
        self._recognise(connection)
        if identity != self._identity_at_path() or self._identity not in (None, identity):
            # SQLite opens the -wal file later and by its name: it may be that of another file than the one opened.
            connection.close(force=True)
            raise LedgerReplaced(f"{self.path} was replaced while it was opened. Try again.")
        # The plan of every hot query is pinned by INDEXED BY; nothing here may depend on statistics.
        self._identity = identity
        return connection

    def _identity_at_path(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self.path)
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def _recognise(self, connection: apsw.Connection) -> None:
        """Learn which ledger the file holds, or raise LedgerReplaced if it is another one than before."""
        try:
            rows = list(connection.execute("SELECT id FROM unstuck_ledger"))
        except apsw.SQLError:
            rows = []  # No tables yet.
        found: str | None = rows[0][0] if rows else None
        if self.ledger_id is None:
            self.ledger_id = found
        elif found != self.ledger_id:
            connection.close(force=True)
            holds = f"holds another ledger ({found})" if found else "holds no ledger any more"
            raise LedgerReplaced(
                f"{self.path} {holds} than the one that this process works with ({self.ledger_id}). Put the right "
                "file back, and everything goes on; or restart what uses it."
            )

    # Writing ----------------------------------------------------------------------------------

    def _acquire(self, deadline: float, limit_s: float) -> None:
        try:
            self.lock.acquire(deadline, limit_s)
        except LedgerError:
            raise
        except OSError as error:
            raise self._cannot_open(error) from error

    def _begin(self, durable: bool) -> apsw.Connection | None:
        """Begin a write, or give None where a stranger holds SQLite's own lock."""
        try:
            if self._writer is None:
                writer = self._connect(BUSY_SLICE_S)
                if writer.pragma("journal_mode") != "wal":
                    writer.pragma("journal_mode", "wal")
                writer.set_wal_hook(self._count_wal_pages)
                self._writer = writer
                self._durable = True
            if durable is not self._durable:
                self._writer.pragma("synchronous", "FULL" if durable else "NORMAL")
                self._durable = durable
            self._writer.execute("BEGIN IMMEDIATE")
            if self.ledger_id is None:
                self._recognise(self._writer)
            else:
                self.lock.mark(self.ledger_id)
        except (apsw.BusyError, apsw.LockedError, apsw.ProtocolError):
            return None
        except Exception as error:
            translated = self._translate(error, self._writer)
            self._drop_writer()
            if translated is error:
                raise
            raise translated from error
        return self._writer

    def _transact(self, connection: apsw.Connection) -> Iterator[apsw.Cursor]:
        committing = False
        try:
            cursor = connection.cursor()
            yield cursor
            cursor.close()
            if failpoints.active:
                failpoints.reached("sqlite.inside_write")
            committing = True
            connection.execute("COMMIT")
        except BaseException as error:
            translated = self._translate(error, connection, committing=committing)
            self._roll_back(connection)
            if translated is error:
                raise
            raise translated from error
        if self._wal_pages >= CHECKPOINT_PAGES:
            self._checkpoint(connection)

    def _roll_back(self, connection: apsw.Connection) -> None:
        try:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        except apsw.Error:
            # A connection that cannot even roll back is of no more use; closing it rolls back.
            self._drop_writer()

    def _translate(
        self, error: BaseException, connection: apsw.Connection | None, *, committing: bool = False
    ) -> BaseException:
        if not isinstance(error, apsw.Error | UnicodeEncodeError | OverflowError):
            return error
        number = 0 if connection is None else connection.system_errno
        return translate(error, str(self.path), system_errno=number, committing=committing)

    def _count_wal_pages(self, _connection: apsw.Connection, _name: str, pages: int) -> int:
        self._wal_pages = pages
        if pages < CHECKPOINT_PAGES:
            # The WAL began anew: whoever was in the way is gone.
            self._restart_from_pages = 0
        return apsw.SQLITE_OK

    def _checkpoint(self, connection: apsw.Connection) -> None:
        """Copy the WAL back while we hold the fair lock: no writer of ours can keep it from being reset."""
        mode = apsw.SQLITE_CHECKPOINT_PASSIVE
        try:
            if self._wal_pages >= max(RESTART_PAGES, self._restart_from_pages):
                mode = apsw.SQLITE_CHECKPOINT_RESTART
                connection.set_busy_timeout(int(RESTART_BUSY_S * 1000))
            connection.wal_checkpoint(mode=mode)
        except (apsw.BusyError, apsw.LockedError):
            # A long reader. We hold the write lock, so nobody may wait for it with every commit: the next try comes
            # when the WAL has grown as much again.
            self._restart_from_pages = self._wal_pages + RESTART_PAGES
        except apsw.Error:
            # The transaction is committed and safe in the WAL: its caller must not be told otherwise.
            self._drop_writer()
        finally:
            if self._writer is not None and mode == apsw.SQLITE_CHECKPOINT_RESTART:
                connection.set_busy_timeout(int(BUSY_SLICE_S * 1000))

    # Closing ----------------------------------------------------------------------------------

    def _close_connections(self) -> None:
        self._drop_writer()
        self._drop_reader()
        self._identity = None

    def _drop_writer(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close(force=True)

    def _drop_reader(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close(force=True)

    def before_fork(self) -> None:
        self._fork_locks = [lock for lock in (self._writing, self._reading) if lock.acquire(timeout=FORK_PATIENCE_S)]
        if len(self._fork_locks) == 2:
            self._close_connections()

    def after_fork_in_parent(self) -> None:
        for lock in self._fork_locks:
            lock.release()
        self._fork_locks = []

    def after_fork_in_child(self) -> None:
        if len(self._fork_locks) < 2:
            # Somebody was inside SQLite for longer than a fork can wait. Those connections are never touched
            # again here, not even by the garbage collector.
            self._torn = True
            self._abandon_connections()
        self._fork_locks = []
        self._writer = self._reader = None
        self._identity = None
        self._writing = threading.Lock()
        self._reading = threading.Lock()
        self.lock.forget()

    def _abandon_connections(self) -> None:
        for connection in (self._writer, self._reader):
            if connection is not None:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))
        self._writer = self._reader = None


def connect(name: str, flags: int = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE) -> apsw.Connection:
    """Open a connection with the settings that every one of ours has."""
    connection = apsw.Connection(name, flags=flags, statementcachesize=STATEMENTS_KEPT)
    connection.pragma("foreign_keys", True)
    # Without this, SQLite compiles a statement again whenever a value is bound that a partial index might depend on.
    # That takes longer than to run it. No plan of ours depends on a bound value.
    connection.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)
    return connection


def refuse_vanished(path: Path, known: str | None = None) -> None:
    """Raise LedgerReplaced if there was a ledger in a file that is missing: `known` here, or noted beside it.

    What has it open keeps it open: of a deleted file that is all there is."""
    lock = path.with_name(path.name + "-lock")
    seen = known or read_mark(lock)
    # The mark may be of somebody who makes the first ledger just now.
    if not seen or path.exists():
        return
    anew = f"delete {lock} too" if known is None else f"delete {lock} and restart what uses it"
    raise LedgerReplaced(
        f"{path} was deleted or moved: there was a ledger in it ({seen}). Put the file back, with its -wal file if "
        f"there is one, and everything goes on. To begin with an empty ledger instead, {anew}."
    )


SQL = load_queries(
    "unstuck.ledger.sqlite.queries",
    "claim.sql",
    "workers.sql",
    "maintenance.sql",
    "jobs.sql",
    "diagnosis.sql",
    "events.sql",
    "admin.sql",
    "queues.sql",
    "schedules.sql",
    "workflows.sql",
)


def fetch(cursor: apsw.Cursor, query: str, values: Sequence[Any] = ()) -> list[Any]:
    """Run a named query and give all of its rows."""
    return cursor.execute(SQL[query], values).fetchall()


def write_event(
    cursor: apsw.Cursor,
    kind: str,
    message: str,
    *,
    job_id: int | None = None,
    worker_id: str | None = None,
    about: str | None = None,
) -> None:
    cursor.execute(SQL["insert_event"], (time.time(), kind, job_id, worker_id, about, message))
