"""One managed connection: one call at a time, urgent calls first, every wait bounded."""

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, TypeVar

import psycopg
from psycopg.pq import ConnStatus

from unstuck import logs
from unstuck.domain.jitter import jitter
from unstuck.errors import LedgerError, LedgerUnavailable
from unstuck.ledger.postgres import errors
from unstuck.ledger.postgres.connect import PATIENT_S, Address, Bounds, Connection, NoAnswer, Session, connect
from unstuck.ledger.postgres.late_socket import LateSocket
from unstuck.ledger.postgres.prepared import PREPARING_FAILED, stop_preparing

GIVE_WAY_S = 0.001


class CallLock:
    """A reentrant lock with a bounded wait. `with lock:` raises LedgerUnavailable if others keep it for too long."""

    def __init__(self, purpose: str, limit_s: float) -> None:
        self._purpose = purpose
        self._limit_s = limit_s
        self._lock = threading.RLock()
        self._depth = 0
        """How often the owner has it. Read and written by the owner only."""
        self._urgent = 0
        self._counting = threading.Lock()

    def __enter__(self) -> None:
        if not self._lock.acquire(timeout=self._limit_s):
            raise self._busy()
        self._depth += 1
        if self._urgent and self._depth == 1:
            self._give_way()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()

    def acquire_urgently(self) -> None:
        """Be the next, before everybody who waits already: for heartbeats."""
        with self._counting:
            self._urgent += 1
        try:
            entered = self.acquire(self._limit_s)
        finally:
            with self._counting:
                self._urgent -= 1
        if not entered:
            raise self._busy()

    def acquire(self, timeout_s: float = -1) -> bool:
        """Return whether we have it now; a negative timeout waits as long as it takes."""
        entered = self._lock.acquire(timeout=timeout_s)
        if entered:
            self._depth += 1
        return entered

    def try_acquire(self) -> bool:
        """Return whether we have it now. Never waits."""
        entered = self._lock.acquire(blocking=False)
        if entered:
            self._depth += 1
        return entered

    def release(self) -> None:
        self._depth -= 1
        self._lock.release()

    def _give_way(self) -> None:
        """Make way for urgent callers: a plain lock goes to the first thread that wakes."""
        until_s = time.monotonic() + self._limit_s
        while self._urgent and time.monotonic() < until_s:
            self.release()
            time.sleep(GIVE_WAY_S)
            if not self.acquire(self._limit_s):
                raise self._busy()

    def _busy(self) -> LedgerUnavailable:
        # Not LedgerBusy: that says that the server answered, and whoever keeps the connection may wait in vain.
        return LedgerUnavailable(
            f"The {self._purpose} connection to PostgreSQL was in use by other calls of this process for "
            f"{self._limit_s:.1f} s. Nothing was sent. Try again soon."
        )


Row = tuple[Any, ...]
Statement = tuple[bytes, Mapping[str, Any]]
T = TypeVar("T")
CONFLICT_TRIES = 8
"""How often a transaction that lost against another (deadlock, serialization) is repeated as it was."""
SERVICE = "service"
"""The connection whose session is a worker's proof of life."""
CALLS_AHEAD = 3
"""How many calls, each up to its deadline, one waits for that wants the same connection."""
_MAX_READS = 100
_AT_ONCE = 50
_CONFLICTS = frozenset({"40001", "40P01"})
_LIMITS = b"select set_config('lock_timeout', %(lock)s, true), set_config('statement_timeout', %(statement)s, true)"

log = logs.logger("unstuck.ledger")


class ManagedConnection:
    """A connection and its lock. Whoever calls waits for its turn, and gets our errors only."""

    def __init__(self, purpose: str, address: Address, schema: str, bounds: Bounds) -> None:
        self.purpose = purpose
        self.bounds = bounds
        self._address = address
        self._schema = schema
        self._lock = CallLock(purpose, CALLS_AHEAD * bounds.answer_s)
        limits = {"lock": f"{bounds.lock_s * 1000:.0f}", "statement": f"{bounds.statement_s * 1000:.0f}"}
        self._limits = _LIMITS, limits
        self._missed = False
        self._late_socket = LateSocket()
        self._session: Session | None = None
        self._owner_pid = 0
        self._closed = False
        self._prepared: frozenset[bytes] = frozenset()
        self._on_open: list[Callable[[Session], None]] = []
        self._on_change: list[Callable[[], None]] = []
        self.asks_first: Sequence[Statement] = ()  # Behind a pooler, where a connection outlives its server.

    def on_open(self, greet: Callable[[Session], None]) -> None:
        """Call `greet` with every session as it opens (the present one too), before anything else uses it."""
        with self._lock:
            self._on_open.append(greet)
            if self._session is not None:
                greet(self._session)

    def on_change(self, tell: Callable[[], None]) -> None:
        """Call `tell` whenever the connection was opened or dropped: who selects on its socket must look again."""
        self._on_change.append(tell)

    def prepare(self, queries: Iterable[bytes]) -> None:
        """Have the server parse and plan these once per connection, unless a pooler stands between."""
        self._prepared = frozenset(queries)

    def ask(self, query: bytes, values: Mapping[str, Any] | None = None) -> list[Row]:
        """Run a statement that may be repeated: a read, or a write that is the same when done twice."""
        with self._lock:
            return self.again_if_cut(lambda: self._execute(query, values, uncertain=False))

    def write(self, query: bytes, values: Mapping[str, Any] | None = None) -> list[Row]:
        """Run a statement that must not be repeated blindly; UncertainCommit when its answer is lost."""
        with self._lock:
            return self._execute(query, values, uncertain=True)

    def write_all(self, statements: Sequence[Statement]) -> list[list[Row]]:
        """Run several statements in one transaction and one round trip, and give the rows of each.

        Like `write` it must not be repeated blindly."""
        if len(statements) == 1:
            return [self.write(*statements[0])]
        with self._lock:
            return self._run(lambda connection: self._after(connection, self.asks_first, statements), uncertain=True)

    def again_if_cut(self, call: Callable[[], T]) -> T:
        """Call once more on a new connection where the one that was open broke: the server may have cut it alone."""
        was_open = self._session is not None
        try:
            return call()
        except LedgerUnavailable:
            if not was_open or self._session is not None or self._closed:
                raise
            return call()

    def ignore(self, *callbacks: object) -> None:
        """Call these no more."""
        with self._lock:
            self._on_open = [greet for greet in self._on_open if greet not in callbacks]
            self._on_change = [tell for tell in self._on_change if tell not in callbacks]

    @contextmanager
    def hold(self, *, urgent: bool = False) -> Iterator[None]:
        """Keep the lane for several calls; `urgent` goes before everybody who waits for it."""
        if not urgent:
            with self._lock:
                yield
            return
        self._lock.acquire_urgently()
        try:
            yield
        finally:
            self._lock.release()

    @contextmanager
    def transaction(self, *, patient: bool = False) -> Iterator[Connection]:
        """Yield the connection inside one transaction, for the few things that need several statements.

        `patient` is for migrations and repairs: a statement may run for up to PATIENT_S."""
        with self._lock:
            session = self.open()
            try:
                if patient:
                    session.connection.answer_s = PATIENT_S
                with session.connection.transaction():
                    if patient:
                        session.connection.execute(b"set local statement_timeout = 0")
                    yield session.connection
            except psycopg.Error as error:
                raise self._translated(error, uncertain=True) from None
            except BaseException:
                self._drop_if_broken()
                raise
            finally:
                session.connection.answer_s = self.bounds.answer_s

    def open(self) -> Session:
        """Give the open session, or open one."""
        with self._lock:
            if self._closed:
                raise LedgerError("This ledger is closed. Open a new one.")
            if self._session is not None:
                if self._owner_pid != os.getpid():
                    raise LedgerError(
                        "This ledger was opened before a fork and cannot be used in the child process. Open a new one "
                        "after the fork."
                    )
                if self._is_alive(self._session):
                    return self._session
                self._drop()
            session = self._connect()
            try:
                for greet in self._on_open:
                    greet(session)
            except psycopg.Error as error:
                session.connection.close()
                raise errors.lost_error(error, self._address.where, uncertain=False) from None
            except BaseException:
                session.connection.close()
                raise
            self._session = session
            self._owner_pid = os.getpid()
            session.connection.proves_life = self.purpose == SERVICE and not session.pooled
            # The server knows the new session by now, so that the end of the old one says nothing any more.
            self._late_socket.close()
            self._changed()
            if self._missed:
                self._missed = False
                info = session.connection.info
                log.info("Connected to PostgreSQL again", connection=self.purpose, server=f"{info.host}:{info.port}")
            return session

    def lend(self) -> Session | None:
        """Give the session to somebody who has it alone until `give_back`; None where none is open, well and free.
        Never waits. Whoever asks meanwhile gets another."""
        if not self._lock.try_acquire():
            return None
        try:
            session = self._session
            if session is None or self._closed or self._owner_pid != os.getpid():
                return None
            if not self._is_alive(session):
                self._drop()
                return None
            self._session = None
            return session
        finally:
            self._lock.release()

    def give_back(self, session: Session) -> None:
        """Take a session back, unless there is another one by now, or nobody wants it any more."""
        if self._lock.try_acquire():
            try:
                if self._session is None and not self._closed:
                    self._session = session
                    return
            finally:
                self._lock.release()
        with suppress(psycopg.Error):
            session.connection.close()

    def socket_fd(self) -> int | None:
        """Give the socket of the open connection, without waiting for the lock; it may be replaced at any moment."""
        session = self._session
        if session is None:
            return None
        with suppress(psycopg.Error):
            return session.connection.pgconn.socket
        return None

    def collect(self) -> None:
        """Take in what the server sent unasked; notifies go to their handlers, a dead connection is dropped."""
        with self._lock:
            if self._session is not None and not self._is_alive(self._session):
                self._drop()

    def leave_other_servers(self, server: str) -> None:
        """Drop a connection to any other run of a server than this one, even if a call waits for its answer.

        Whoever found this one first found the primary. The other is hung, demoted or gone, and would only be noticed
        when the deadline of the call passes."""
        session = self._session
        if session is None or session.pooled or session.server == server:
            return
        log.warning("Another server is the primary now; leaving the old one", connection=self.purpose)
        if self._lock.try_acquire():
            try:
                self._drop()
            finally:
                self._lock.release()
        else:
            self._cut()

    def close(self) -> None:
        """Close for good, also when another thread waits for an answer on it."""
        self._closed = True
        if not self._lock.acquire(0.05):
            self._cut()
            self._lock.acquire()
        try:
            self._drop()
            self._late_socket.close()
        finally:
            self._lock.release()

    # ------------------------------------------------------------------------------------------

    def _connect(self) -> Session:
        try:
            return connect(self._address, self.purpose, self.bounds)
        except errors.NoSlotLeft:
            # Our own session may take the place of the next one. While the server is full, its end proves nothing.
            self._late_socket.close()
            raise

    def _execute(self, query: bytes, values: Mapping[str, Any] | None, *, uncertain: bool) -> list[Row]:
        def work(connection: Connection) -> list[Row]:
            first = self.asks_first
            if self.bounds.each_transaction and self._session is not None and self._session.pooled:
                first = [self._limits, *first]
            if first:
                return self._after(connection, first, [(query, values or {})])[0]
            return _all_of(connection.execute(query, values, binary=True, prepare=query in self._prepared))

        return self._run(work, uncertain)

    def _after(self, connection: Connection, first: Sequence[Statement], rest: Sequence[Statement]) -> list[list[Row]]:
        return _pipelined(connection, [*first, *rest], self._prepared)[len(first) :]

    def _run(self, work: Callable[[Connection], T], uncertain: bool) -> T:
        for tries in range(1, CONFLICT_TRIES + 1):
            connection = self.open().connection
            try:
                return work(connection)
            except psycopg.Error as error:
                if error.sqlstate in PREPARING_FAILED and tries < CONFLICT_TRIES and stop_preparing(connection):
                    continue
                if error.sqlstate in _CONFLICTS and tries < CONFLICT_TRIES and not connection.closed:
                    # Rolled back as a whole: to repeat it is the documented answer.
                    time.sleep(jitter.uniform(0, 0.002 * tries))
                    continue
                raise self._translated(error, uncertain=uncertain) from None
            except UnicodeEncodeError as error:
                raise errors.unwritable_text(error) from None
            except BaseException:
                # Interrupted in the middle: the state of the protocol is anybody's guess.
                self._drop()
                raise
        raise AssertionError("unreachable")

    def _translated(self, error: psycopg.Error, *, uncertain: bool) -> LedgerError:
        if isinstance(error, NoAnswer):
            if not self._missed:
                log.warning(
                    "PostgreSQL does not answer; dropping the connection",
                    connection=self.purpose,
                    server=self._address.where,
                    waited_s=self.bounds.answer_s,
                )
            self._missed = True
        if self._drop_if_broken():
            return errors.lost_error(error, self._address.where, uncertain=uncertain)
        if error.sqlstate == "25006":
            # After a failover the address may name another server: connect afresh next time.
            self._drop()
        return errors.statement_error(error, self._address.where, self._schema)

    def _drop_if_broken(self) -> bool:
        if self._session is not None and self._session.connection.closed:
            self._drop()
        return self._session is None

    def _is_alive(self, session: Session) -> bool:
        """See an end of the connection *before* something is sent: so it is certain that nothing was written."""
        pgconn = session.connection.pgconn
        if pgconn.status != ConnStatus.OK:
            return False
        poller = select.poll()
        poller.register(pgconn.socket, select.POLLIN)
        try:
            # The server's last words come before the end of the stream: read until there is nothing more.
            for _ in range(_MAX_READS):
                if not poller.poll(0):
                    break
                pgconn.consume_input()
                while notify := pgconn.notifies():
                    if pgconn.notify_handler:
                        pgconn.notify_handler(notify)
        except psycopg.Error:
            return False
        return pgconn.status == ConnStatus.OK

    def _drop(self) -> None:
        session, self._session = self._session, None
        if session is not None and self._owner_pid == os.getpid():
            self._late_socket.keep(session.connection.late_socket)
            with suppress(psycopg.Error):
                session.connection.close()
            self._changed()

    def _changed(self) -> None:
        for tell in self._on_change:
            tell()

    def _cut(self) -> None:
        fd = self.socket_fd()
        if fd is not None:
            with suppress(OSError), socket.socket(fileno=os.dup(fd)) as same:
                same.shutdown(socket.SHUT_RDWR)


def _pipelined(connection: Connection, statements: Sequence[Statement], prepared: frozenset[bytes]) -> list[list[Row]]:
    """Send all statements before an answer is read. One that fails takes the others with it."""
    failed: psycopg.Error | None = None
    cursors = []
    try:
        with connection.pipeline():
            try:
                # Said aloud, though one pipeline is one transaction by itself: whatever interrupts us in here, the
                # driver ends the pipeline in order, and the half of it that was sent would be committed.
                connection.execute(b"begin")
                for query, values in statements:
                    cursors.append(connection.execute(query, values, binary=True, prepare=query in prepared))
                connection.execute(b"commit")
            except psycopg.Error as error:
                # The first is the cause. What the end of the pipeline says afterwards is that nothing else was done.
                failed = error
    except psycopg.Error as error:
        failed = failed or error
    except UnicodeEncodeError:
        connection.rollback()
        raise
    if failed is not None:
        if not connection.closed:
            connection.rollback()
        raise failed
    return [_all_of(cursor) for cursor in cursors]


def _all_of(cursor: psycopg.Cursor[Row]) -> list[Row]:
    """Return every row, read in parts: other threads can run in between, not only after a thousand rows."""
    if cursor.rowcount <= _AT_ONCE:
        return cursor.fetchall()
    rows: list[Row] = []
    while some := cursor.fetchmany(_AT_ONCE):
        rows += some
    return rows
