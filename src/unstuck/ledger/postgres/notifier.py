"""The bell on PostgreSQL: NOTIFY on one channel per schema, heard on a connection that is there anyway."""

import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress

from psycopg import Notify
from psycopg.sql import SQL, Identifier

from unstuck.errors import LedgerError
from unstuck.ledger.postgres.connect import Session
from unstuck.ledger.postgres.connection import ManagedConnection

MAX_PAYLOAD_BYTES = 7000
"""PostgreSQL allows 8000 for one NOTIFY."""
FIRST_RETRY_S = 0.05
MAX_RETRY_S = 1.0
QUIET_AFTER_FAILURE_S = 1.0
SEPARATOR = "\n"


class PostgresListener:
    """Hear the rings that concern one worker; with `lane` None it only waits, and polling does the work."""

    def __init__(self, connection: ManagedConnection | None, channel: str, concerns: Callable[[str], bool]) -> None:
        self._connection = connection
        self._channel = channel
        self._concerns = concerns
        self._words: set[str] = set()
        self._words_lock = threading.Lock()
        self._interrupted = False
        self._closed = False
        self._reading, self._writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # Closed when nobody can reach us any more, and not by `close`: another thread, or a signal handler, may be
        # about to use them, and a number that is free again may be somebody else's file by then.
        weakref.finalize(self, _close_both, self._reading, self._writing)
        if connection is not None:
            connection.on_change(self._nudge)
            connection.on_open(self._greet)

    def wait(self, timeout_s: float) -> frozenset[str]:
        """Select on the connection's socket without holding its lock: others may use it meanwhile."""
        deadline = time.monotonic() + timeout_s
        retry_s = FIRST_RETRY_S
        while not self._closed:
            words = self._take()
            if words or self._interrupted:
                self._interrupted = False
                return words
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return frozenset()
            if self._connection is None or self._reopen():
                retry_s = FIRST_RETRY_S
                self._select(left_s)
            else:
                self._select(min(left_s, retry_s))
                retry_s = min(MAX_RETRY_S, retry_s * 2)
        return frozenset()

    def interrupt(self) -> None:
        self._interrupted = True
        self._nudge()

    def close(self) -> None:
        self._closed = True
        self._nudge()
        if self._connection is not None:
            self._connection.ignore(self._nudge, self._greet)

    def _greet(self, session: Session) -> None:
        if session.pooled or self._closed:
            return
        # The connection outlives the listener, and must not keep it.
        me = weakref.ref(self)

        def hear(notify: Notify) -> None:
            listener = me()
            if listener is not None:
                listener._heard(notify)

        session.connection.add_notify_handler(hear)
        session.connection.execute(SQL("listen {}").format(Identifier(self._channel)))

    def _heard(self, notify: Notify) -> None:
        words = [word for word in notify.payload.split(SEPARATOR) if word and self._concerns(word)]
        if words:
            with self._words_lock:
                self._words.update(words)
            self._nudge()

    def _take(self) -> frozenset[str]:
        with self._words_lock:
            words = frozenset(self._words)
            self._words.clear()
        return words

    def _reopen(self) -> bool:
        assert self._connection is not None
        if self._connection.socket_fd() is not None:
            return True
        try:
            self._connection.open()
        except LedgerError:
            return False
        return True

    def _select(self, timeout_s: float) -> None:
        poller = select.poll()
        poller.register(self._reading, select.POLLIN)
        fd = None if self._connection is None else self._connection.socket_fd()
        if fd is not None:
            poller.register(fd, select.POLLIN)
        ready = {found for found, _ in poller.poll(timeout_s * 1000)}
        if self._reading in ready:
            with suppress(OSError):
                os.read(self._reading, 4096)
        if fd in ready and self._connection is not None:
            self._connection.collect()

    def _nudge(self) -> None:
        # A full pipe is as good as one byte: the reader wakes either way.
        with suppress(OSError):
            os.write(self._writing, b"!")


def _close_both(reading: int, writing: int) -> None:
    os.close(reading)
    os.close(writing)


class Notifier:
    """Ring for others, outside any transaction; what is rung while a ring is on its way goes with the next one."""

    def __init__(self, query: bytes, channel: str) -> None:
        self._query = query
        self._channel = channel
        self._lock = threading.Lock()
        self._waiting: set[str] = set()
        self._ringing = False
        self._quiet_until_s = 0.0

    def notify(self, words: Iterable[str], connection: ManagedConnection) -> None:
        with self._lock:
            self._waiting.update(words)
            if self._ringing or not self._waiting:
                # Whoever rings now takes our words along before it leaves.
                return
            self._ringing = True
        try:
            while words := self._next():
                self._send(words, connection)
        except BaseException:
            self._ringing = False
            raise

    def _next(self) -> Collection[str]:
        with self._lock:
            words, self._waiting = self._waiting, set()
            self._ringing = bool(words)
            return words

    def _send(self, words: Collection[str], connection: ManagedConnection) -> None:
        if time.monotonic() < self._quiet_until_s:
            return
        try:
            for payload in payloads(words):
                connection.ask(self._query, {"channel": self._channel, "payload": payload})
        except LedgerError:
            # A bell that cannot be rung costs a poll interval; a caller who waits for it costs more.
            self._quiet_until_s = time.monotonic() + QUIET_AFTER_FAILURE_S


def payloads(words: Collection[str]) -> list[str]:
    """Pack words into as few NOTIFY payloads as will hold them."""
    packed: list[list[str]] = [[]]
    size = 0
    for word in sorted(words):
        length = len(word.encode("utf-8", "replace")) + 1
        if length > MAX_PAYLOAD_BYTES:
            continue
        if size + length > MAX_PAYLOAD_BYTES:
            packed.append([])
            size = 0
        packed[-1].append(word)
        size += length
    return [SEPARATOR.join(part) for part in packed if part]
