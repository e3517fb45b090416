"""The thread that owns the ROUTER socket: connections of clients, and a limit on memory."""

import gc
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

from unstuck import host
from unstuck.config import MdpSettings
from unstuck.logs import logger
from unstuck.mdp import protocol
from unstuck.mdp.broker.batch import Batch, BatchResult
from unstuck.mdp.broker.core import BrokerCore


class ClientConnections:
    """Told in this order, round by round: `heard` and `ended` as they come, then `settle` when all ends are known that
    came before what was heard."""

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
        """Somebody was heard through a connection of which nothing was known."""
        return bool(self._heard)

    def ended(self, connection: int) -> None:
        for client in self._on_connection.pop(connection, ()):
            del self._connection_of[client]
            self._gone.add(client)

    def settle(self, standing: set[int]) -> set[bytes]:
        """Give the clients that are gone. One that was heard through a connection that stands has come back."""
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


MEASURE_EVERY_S = 0.25
TRIM_EVERY_S = 1.0
LONGEST_PAUSE_S = 30.0
PEAK_BYTES = 64 * 1024 * 1024
"""What the process must hold beyond its first weight before freed memory is worth giving back."""
ROOM = 2
"""A sitting may at least double what the process held at its beginning: what is there then was not the last socket's,
and closing the next one would not free it either."""


class MemoryWatch:
    """Of one sitting."""

    def __init__(self, limit_bytes: int, now_s: float) -> None:
        self._at_first_bytes = host.memory_bytes(os.getpid())
        self.limit_bytes = max(limit_bytes, ROOM * self._at_first_bytes)
        self._weigh_at_s = now_s + MEASURE_EVERY_S
        self._trim_at_s = now_s
        self._pause_s = TRIM_EVERY_S

    def is_over(self, now_s: float) -> bool:
        """Look from time to time whether the limit is passed. Memory that was only freed does not count, and is given
        back after a peak."""
        if now_s < self._weigh_at_s:
            return False
        self._weigh_at_s = now_s + MEASURE_EVERY_S
        held_bytes = host.memory_bytes(os.getpid())
        if held_bytes > self._at_first_bytes + PEAK_BYTES and now_s >= self._trim_at_s:
            host.release_free_memory()
            before_bytes, held_bytes = held_bytes, host.memory_bytes(os.getpid())
            # It takes a while with a large heap. If all of it is in use, there is no need to try again soon.
            in_use = held_bytes > before_bytes - PEAK_BYTES / 4
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S) if in_use else TRIM_EVERY_S
            self._trim_at_s = now_s + self._pause_s
        return held_bytes > self.limit_bytes


def give_back() -> None:
    """Free what only cycles of objects hold, and give it to the system."""
    gc.collect()
    host.release_free_memory()


MAX_DRAINED = 5_000
"""Messages taken at once, before anything else gets its turn."""
MAX_DRAINED_BYTES = 64 * 1024 * 1024
MAX_UNDRAINED = 4
"""Rounds that a death waits for last words while more comes than is taken."""
LONGEST_NAP_S = 0.5
ZMTP_BEAT_MS = 500
ZMTP_TIMEOUT_MS = 1_500
"""By the library itself, below Majordomo: a process that is stopped, or a cut network, is seen without any beat."""
FAR_ABOVE = 4
HEAD_FRAMES = 5
"""Of a message that is too large: enough to know which reply it would have been."""
TOO_LARGE = "a message of too many frames or bytes"
CUT_OFF = "a connection that ended before its first message, as a frame far above the limit ends it"
QUEUED_PER_PEER = 10_000
LINGER_MS = 500

log = logger("unstuck.mdp.broker")

Message = tuple[bytes, list[bytes], int | None]

# Plain numbers: the library's own are enumerations, and putting two together costs more than sending a frame.
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
    # No ROUTER_HANDOVER: with it libzmq 4.3.5 leaves the older connection without a pipe, and the next beat after its
    # end aborts the process (`!_io_error`). Who comes back waits until its shadow is gone: the beats below see to that.
    # A frame above our own limit is dropped and counted, and its connection goes on. Far above it the library ends the
    # connection before it has taken all of it.
    router.set(zmq.MAXMSGSIZE, FAR_ABOVE * settings.max_message_bytes)
    router.set(zmq.HANDSHAKE_IVL, int(settings.handshake_timeout_s * 1000))
    router.set(zmq.HEARTBEAT_IVL, ZMTP_BEAT_MS)
    router.set(zmq.HEARTBEAT_TIMEOUT, ZMTP_TIMEOUT_MS)
    router.set(zmq.SNDHWM, QUEUED_PER_PEER)
    # Never full: libzmq 4.3.5 aborts the process when a full connection ends before its next ZMTP heartbeat.
    router.set(zmq.RCVHWM, 0)
    router.set(zmq.LINGER, LINGER_MS)
    router.set(zmq.BACKLOG, 1024)
    return router


def watch_connections(router: "zmq.Socket[bytes]") -> "zmq.Socket[bytes]":
    """Return what tells of connections. Call it before the socket is bound: a peer whose connection began unseen would
    not be heard."""
    return router.get_monitor_socket(_WATCHED)


class SocketLoop:
    """Runs in the thread that made it; `wake`, `heard` and `answered` may be called from others."""

    def __init__(
        self,
        router: "zmq.Socket[bytes]",
        monitor: "zmq.Socket[bytes]",
        core: BrokerCore,
        batch: Callable[[Batch], None],
        settings: MdpSettings,
    ) -> None:
        self._router = router
        self._core = core
        self._batch = batch
        self._max_frames = settings.max_frames
        self._max_bytes = settings.max_message_bytes
        self._monitor = monitor
        self._open: set[int] = set()
        """Connections that stand, by file descriptor: the number of one that ended is soon another's."""
        self._spoken: set[int] = set()
        """Those of them that have said something."""
        self._refused: Counter[int] = Counter()
        """Connections that ended in their handshake, several with one number: no peers of ours."""
        self._handshake_failed = False
        """The next end that is told is that of a connection whose handshake failed."""
        self._ended: list[int] = []
        """Connections that ended, whose last words may not have been taken yet."""
        self._undrained = 0
        """Rounds in which more came than was taken."""
        self._clients = ClientConnections()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False
        # A clerk that the ledger kept waiting, or a second signal, may come when another file has the number already.
        # Held by this thread too when a signal comes in the midst of it.
        self._ending = threading.RLock()
        self._answers: deque[BatchResult] = deque()
        self._words: deque[frozenset[str]] = deque()
        self._stopping = False
        self._memory_watch = MemoryWatch(settings.max_memory_bytes, time.monotonic())
        self.is_too_heavy = False
        """It ended since its socket holds too much."""
        self._error: BaseException | None = None
        self._poller = zmq.Poller()
        for one in (self._router, self._monitor, self._wakeup):
            self._poller.register(one, zmq.POLLIN)

    # From other threads -----------------------------------------------------------------------

    def wake(self) -> None:
        with self._ending:
            if not self._closed:
                os.eventfd_write(self._wakeup, 1)

    def answered(self, answer: BatchResult) -> None:
        self._answers.append(answer)
        self.wake()

    def heard(self, words: frozenset[str]) -> None:
        self._words.append(words)
        self.wake()

    def failed(self, error: BaseException) -> None:
        """End the loop with this error."""
        self._error = error
        self.stop()

    def stop(self) -> None:
        """May be called by a signal."""
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
        """Wait for something, and do all that follows from it."""
        now_s = time.monotonic()
        tick_s = self._core.next_tick_s(now_s)
        nap_s = 0.0 if self._ended else min(max(tick_s - now_s, 0.0), LONGEST_NAP_S)
        ready = dict(self._poller.poll(int(nap_s * 1000) + (nap_s > 0)))
        if self._wakeup in ready:
            os.eventfd_read(self._wakeup)
        # What ended before all that came was taken has said its last words; what ends meanwhile waits for a round.
        ended = self._ended + (self._see_ends() if self._monitor in ready else [])
        messages, drained = self._take_all() if ended or self._router in ready else ([], True)
        # Whoever is new must have come through a connection that is known to stand, or not to stand any more.
        is_new = self._clients.unsettled or any(connection is not None for _, _, connection in messages)
        self._ended = self._see_ends() if is_new else []
        left = self._clients.settle(self._open)
        now_s = time.monotonic()
        # A death may be told before the last words of the dead: those first. And a number of a connection may have
        # a new owner already: whoever says READY comes after the dead.
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
            self._note_end(gone)
            self._core.on_connection_closed(gone, now_s)
        for identity, parts, connection in newcomers:
            if connection is not None:
                if connection not in self._open:
                    continue
                while connection in self._ended:
                    # That was an owner before it.
                    self._ended.remove(connection)
                    self._note_end(connection, spoke=True)
                    self._core.on_connection_closed(connection, now_s)
            self._core.on_message(identity, parts, connection, now_s)
        for client in left:
            self._core.on_client_gone(client)
        while self._answers:
            self._core.on_batch_done(self._answers.popleft(), now_s)
        while self._words:
            self._core.on_wakeup(self._words.popleft())
        if now_s >= tick_s:
            all_have_spoken = self._core.awaits_abandoned and self._open <= self._spoken
            self._core.on_tick(now_s, all_have_spoken=all_have_spoken)
        batch = self._core.take_batch(now_s)
        if batch is not None:
            self._batch(batch)
        self._send_all()

    def close(self) -> None:
        self._router.disable_monitor()
        self._monitor.close(0)
        self._router.close()
        with self._ending:
            self._closed = True
            os.close(self._wakeup)

    def _measure_memory(self) -> None:
        if self._memory_watch.is_over(time.monotonic()):
            self.is_too_heavy = self._stopping = True

    def _take_all(self) -> tuple[list[Message], bool]:
        """Give all that came, and whether that was really all. Only with READY the connection is told."""
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

    def _see_ends(self) -> list[int]:
        """Give the connections that ended since the last look."""
        ended = []
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())
            connection = event["value"]
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._open.add(connection)
            elif event["event"] != zmq.EVENT_DISCONNECTED:
                # It does not say of which connection; its end follows at once.
                self._handshake_failed = True
            else:
                if self._handshake_failed:
                    self._refused[connection] += 1
                    self._handshake_failed = False
                self._open.discard(connection)
                self._clients.ended(connection)
                ended.append(connection)
        return ended

    def _note_end(self, connection: int, *, spoke: bool = False) -> None:
        """Count a peer that was never heard. All that came before the end was taken.

        It is not counted if the next owner of its number spoke in the same round: nobody can tell the two apart."""
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
                    # It does not read: a client gets no more than it takes, a worker is as good as gone.
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
        # Not every transport and library can say it: then heartbeats must do.
        return None
