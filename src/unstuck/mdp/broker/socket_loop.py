"""The thread that owns the ROUTER socket, and the connections of clients on it."""

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

from unstuck.config import MdpSettings
from unstuck.logs import logger
from unstuck.mdp import protocol
from unstuck.mdp.broker.batch import Batch, BatchResult
from unstuck.mdp.broker.core import BrokerCore
from unstuck.mdp.broker.memory_watch import MemoryWatch


class ClientConnections:
    """The connections of clients. In each step, `heard` and `ended` are called as events come, then `settle` when all
    ends are known that came before the messages."""

    def __init__(self) -> None:
        self._connection_of: dict[bytes, int] = {}
        self._on_connection: dict[int, set[bytes]] = {}
        self._heard: dict[bytes, int] = {}
        self._gone: set[bytes] = set()

    def heard(self, client: bytes, connection: int | None) -> None:
        if connection is not None and self._connection_of.get(client) != connection:
            self._heard[client] = connection

    @property
    def unsettled(self) -> bool:
        """Return whether a client was heard through a new connection."""
        return bool(self._heard)

    def ended(self, connection: int) -> None:
        for client in self._on_connection.pop(connection, ()):
            del self._connection_of[client]
            self._gone.add(client)

    def settle(self, standing: set[int]) -> set[bytes]:
        """Return the clients that are gone. One that was heard through an open connection has come back."""
        for client, connection in self._heard.items():
            if connection in standing:
                self._forget(client)
                self._connection_of[client] = connection
                self._on_connection.setdefault(connection, set()).add(client)
                self._gone.discard(client)
            else:
                self._gone.add(client)
        self._heard = {}
        gone, self._gone = self._gone, set()
        return gone

    def _forget(self, client: bytes) -> None:
        before = self._connection_of.pop(client, None)
        if before is not None:
            self._on_connection[before].discard(client)
            if not self._on_connection[before]:
                del self._on_connection[before]


MAX_DRAINED = 5_000
"""Maximum number of messages received in one step."""
MAX_DRAINED_BYTES = 64 * 1024 * 1024
MAX_UNDRAINED = 4
"""Maximum number of steps that a death waits for the last messages while more come than are received."""
LONGEST_WAIT_S = 0.5
ZMTP_HEARTBEAT_MS = 500
ZMTP_TIMEOUT_MS = 1_500
"""Heartbeats of libzmq, below Majordomo. They detect stopped processes and cut networks on all connections."""
FAR_ABOVE = 4
HEAD_FRAMES = 5
"""Frames that are kept of a message above the limits, enough to know which reply it is."""
TOO_LARGE = "a message of too many frames or bytes"
CUT_OFF = "a connection that ended before its first message, as a frame far above the limit ends it"
QUEUED_PER_PEER = 10_000
LINGER_MS = 500

log = logger("unstuck.mdp.broker")

Message = tuple[bytes, list[bytes], int | None]

# Plain numbers: to combine two enumeration members of the library costs more than to send a frame.
_READABLE = int(zmq.POLLIN)
_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_WATCHED = int(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | _HANDSHAKE_FAILED)
_AT_ONCE = int(zmq.DONTWAIT)
_MORE = int(zmq.DONTWAIT | zmq.SNDMORE)


def open_router(context: "zmq.Context[zmq.Socket[bytes]]", settings: MdpSettings) -> "zmq.Socket[bytes]":
    router = context.socket(zmq.ROUTER)
    router.set(zmq.ROUTER_MANDATORY, 1)
    # No ROUTER_HANDOVER: with it libzmq 4.3.5 leaves the older connection without a pipe, and the next heartbeat after
    # its end aborts the process (`!_io_error`). A peer that comes back waits until its former connection has timed out,
    # which the heartbeats below ensure.
    # A frame above our own limit is dropped and counted, and its connection goes on. Far above it the library ends the
    # connection before it has taken all of it.
    router.set(zmq.MAXMSGSIZE, FAR_ABOVE * settings.max_message_bytes)
    router.set(zmq.HANDSHAKE_IVL, int(settings.handshake_timeout_s * 1000))
    router.set(zmq.HEARTBEAT_IVL, ZMTP_HEARTBEAT_MS)
    router.set(zmq.HEARTBEAT_TIMEOUT, ZMTP_TIMEOUT_MS)
    router.set(zmq.SNDHWM, QUEUED_PER_PEER)
    # Never full: libzmq 4.3.5 aborts the process when a full connection ends before its next ZMTP heartbeat.
    router.set(zmq.RCVHWM, 0)
    router.set(zmq.LINGER, LINGER_MS)
    router.set(zmq.BACKLOG, 1024)
    return router


def watch_connections(router: "zmq.Socket[bytes]") -> "zmq.Socket[bytes]":
    """Return the monitor of connections. Call it before the socket is bound: a worker whose connection was not seen is
    ignored."""
    return router.get_monitor_socket(_WATCHED)


class SocketLoop:
    """Runs in the thread that created it. Others may call `wake`, `on_wakeup`, `on_batch_done` and `on_error`."""

    def __init__(
        self,
        router: "zmq.Socket[bytes]",
        monitor: "zmq.Socket[bytes]",
        core: BrokerCore,
        send_batch: Callable[[Batch], None],
        settings: MdpSettings,
    ) -> None:
        self._router = router
        self._core = core
        self._send_batch = send_batch
        self._max_frames = settings.max_frames
        self._max_bytes = settings.max_message_bytes
        self._monitor = monitor
        self._open: set[int] = set()
        """File descriptors of open connections. A closed one is soon reused."""
        self._spoken: set[int] = set()
        """Open connections that have sent a message."""
        self._refused: Counter[int] = Counter()
        """Connections that ended in their handshake, by file descriptor, of which several may have had the same."""
        self._handshake_failed = False
        """The next end is that of a connection whose handshake failed."""
        self._ended: list[int] = []
        """Closed connections, whose last messages may not have been received yet."""
        self._undrained = 0
        """Steps in which more messages came than were received."""
        self._clients = ClientConnections()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False
        # The ledger thread or a second signal may call `wake` when another file has the descriptor already. Reentrant,
        # since a signal may come while this thread holds it.
        self._closing = threading.RLock()
        self._results: deque[BatchResult] = deque()
        self._topics: deque[frozenset[str]] = deque()
        self._stopping = False
        self._memory_watch = MemoryWatch(settings.max_memory_bytes, time.monotonic())
        self.is_over_memory = False
        """The loop ended because of the memory limit."""
        self._error: BaseException | None = None
        self._poller = zmq.Poller()
        for one in (self._router, self._monitor, self._wakeup):
            self._poller.register(one, zmq.POLLIN)

    # From other threads -----------------------------------------------------------------------

    def wake(self) -> None:
        with self._closing:
            if not self._closed:
                os.eventfd_write(self._wakeup, 1)

    def on_batch_done(self, result: BatchResult) -> None:
        self._results.append(result)
        self.wake()

    def on_wakeup(self, topics: frozenset[str]) -> None:
        self._topics.append(topics)
        self.wake()

    def on_error(self, error: BaseException) -> None:
        """End the loop with this error."""
        self._error = error
        self.stop()

    def stop(self) -> None:
        """End the loop. May be called by a signal handler."""
        self._stopping = True
        self.wake()

    # ------------------------------------------------------------------------------------------

    def run(self) -> None:
        while not self._stopping:
            self.step()
            self._measure_memory()
        if self._error is not None:
            raise self._error

    def step(self) -> None:
        """Wait for an event, and do all that follows from it."""
        now_s = time.monotonic()
        tick_s = self._core.next_tick_s(now_s)
        wait_s = 0.0 if self._ended else min(max(tick_s - now_s, 0.0), LONGEST_WAIT_S)
        ready = dict(self._poller.poll(int(wait_s * 1000) + (wait_s > 0)))
        if self._wakeup in ready:
            os.eventfd_read(self._wakeup)
        # The last messages of a connection that has ended by now are received below. One that ends later waits for the
        # next step.
        ended = self._ended + (self._read_monitor() if self._monitor in ready else [])
        messages, drained = self._receive() if ended or self._router in ready else ([], True)
        # For a new peer it must be known whether its connection is still open.
        is_new = self._clients.unsettled or any(connection is not None for _, _, connection in messages)
        self._ended = self._read_monitor() if is_new else []
        left = self._clients.settle(self._open)
        now_s = time.monotonic()
        # The end of a connection may be reported before its last messages: those first. And its file descriptor may
        # have a new owner already: READY comes after the ends.
        newcomers: list[Message] = []
        fresh: set[bytes] = set()
        for message in messages:
            if message[2] is not None or message[0] in fresh:
                fresh.add(message[0])
                newcomers.append(message)
            else:
                self._core.on_message(*message, now_s)
        self._undrained = 0 if drained else self._undrained + 1
        if self._undrained and self._undrained <= MAX_UNDRAINED:
            ended, self._ended = [], ended + self._ended
        for gone in ended:
            self._count_end(gone)
            self._core.on_connection_closed(gone, now_s)
        for identity, parts, connection in newcomers:
            if connection is not None:
                if connection not in self._open:
                    continue
                while connection in self._ended:
                    # That was a former owner of the descriptor.
                    self._ended.remove(connection)
                    self._count_end(connection, spoke=True)
                    self._core.on_connection_closed(connection, now_s)
            self._core.on_message(identity, parts, connection, now_s)
        for client in left:
            self._core.on_client_gone(client)
        while self._results:
            self._core.on_batch_done(self._results.popleft(), now_s)
        while self._topics:
            self._core.on_wakeup(self._topics.popleft())
        if now_s >= tick_s:
            all_have_spoken = self._core.awaits_abandoned and self._open <= self._spoken
            self._core.on_tick(now_s, all_have_spoken=all_have_spoken)
        batch = self._core.take_batch(now_s)
        if batch is not None:
            self._send_batch(batch)
        self._send_all()

    def close(self) -> None:
        self._router.disable_monitor()
        self._monitor.close(0)
        self._router.close()
        with self._closing:
            self._closed = True
            os.close(self._wakeup)

    def _measure_memory(self) -> None:
        if self._memory_watch.is_over(time.monotonic()):
            self.is_over_memory = self._stopping = True

    def _receive(self) -> tuple[list[Message], bool]:
        """Return the messages that came, and whether that is all of them. The connection is given with READY only."""
        messages: list[Message] = []
        taken_bytes = 0
        while len(messages) < MAX_DRAINED and taken_bytes < MAX_DRAINED_BYTES:
            if not int(self._router.getsockopt(zmq.EVENTS)) & _READABLE:
                return messages, True
            identity = self._router.recv(_AT_ONCE, copy=False)
            parts: list[bytes] = []
            many = False
            size_bytes = 0
            more = identity.more
            while more:
                part = self._router.recv(_AT_ONCE)
                more = bool(self._router.getsockopt(zmq.RCVMORE))
                size_bytes += len(part)
                # The socket's own limit is for each frame.
                if len(parts) < self._max_frames and size_bytes <= self._max_bytes:
                    parts.append(part)
                else:
                    many = True
            taken_bytes += size_bytes
            came_by = _connection_of(identity)
            if came_by is not None:
                self._spoken.add(came_by)
            if many:
                self._core.dropped.add(TOO_LARGE)
                self._core.on_too_large(identity.bytes, parts[:HEAD_FRAMES], time.monotonic())
                continue
            connection = None
            if parts[1:3] == [protocol.WORKER, protocol.READY]:
                connection = came_by
            elif protocol.CLIENT in parts[1:3]:
                self._clients.heard(identity.bytes, came_by)
            messages.append((identity.bytes, parts, connection))
        return messages, False

    def _read_monitor(self) -> list[int]:
        """Give the connections that ended since the last look."""
        ended = []
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())
            connection = event["value"]
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._open.add(connection)
            elif event["event"] != zmq.EVENT_DISCONNECTED:
                # The event has no descriptor. The end of the connection follows at once.
                self._handshake_failed = True
            else:
                if self._handshake_failed:
                    self._refused[connection] += 1
                    self._handshake_failed = False
                self._open.discard(connection)
                self._clients.ended(connection)
                ended.append(connection)
        return ended

    def _count_end(self, connection: int, *, spoke: bool = False) -> None:
        """Count a connection that ended before its first message. All messages before the end were received.

        It is not counted if the next owner of the descriptor sent a message in the same step, since it could be of
        either."""
        if connection in self._refused:
            self._refused[connection] -= 1
            if not self._refused[connection]:
                del self._refused[connection]
        elif not spoke:
            if connection not in self._spoken:
                self._core.dropped.add(CUT_OFF)
            self._spoken.discard(connection)

    def _send_all(self) -> None:
        send = self._router.send
        while sends := self._core.take_sends():
            for to, frames_ in sends:
                try:
                    send(to, _MORE)
                    for frame in frames_[:-1]:
                        send(frame, _MORE)
                    send(frames_[-1], _AT_ONCE)
                except zmq.Again:
                    # It does not read. A client loses the message, a worker is declared dead.
                    self._core.dropped.add("a message to somebody who does not read")
                    self._core.on_unreachable(to)
                except zmq.ZMQError as error:
                    if error.errno != zmq.EHOSTUNREACH:
                        raise
                    self._core.on_unreachable(to)


def _connection_of(frame: zmq.Frame) -> int | None:
    try:
        return int(frame.get(zmq.SRCFD))
    except (zmq.ZMQError, ValueError, AttributeError, TypeError):
        # Not every transport and library knows it. Then a death is detected by heartbeats.
        return None
