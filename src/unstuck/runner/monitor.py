"""The monitor thread of a runner: heartbeats of jobs, lease, stacks on request, answers of the journal.

Signs have a socket of their own, so that they neither wait behind results nor need a lock. A sign that does not
fit, or comes too soon after the last one, is kept and sent with the next pulse: the newest always arrives.
"""

import asyncio
import itertools
import os
import select
import signal
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import NamedTuple, NoReturn

import msgspec

from unstuck import host
from unstuck.domain.endings import storable_text
from unstuck.runner import stacks
from unstuck.runner.messages import (
    ANSWER,
    NO_ANSWER,
    RECEIVE_BYTES,
    REFUSED,
    FrameBuffer,
    JournalAnswer,
    JournalRequest,
    NewEntry,
    request_frame,
)
from unstuck.runner.status_page import StatusPage


class Blocked(NamedTuple):
    """The loop has not turned since then (boot time); token 0 where no job is known to be at work in it."""

    token: int
    since_s: float


MAX_MESSAGE_CHARS = 500
MAX_PACKET_BYTES = 4096
LEAST_GAP_S = 0.02
"""A loop that calls `ctx.heartbeat()` a million times a second must not pay for a million packets."""
QUESTION = struct.Struct("=q")
"""The only packet that goes the other way: where do your threads stand? With a number, for the answer."""


class JobSignal(msgspec.Struct, array_like=True, gc=False):
    """One sign of one attempt; a plain heartbeat says nothing of how far it is."""

    token: int
    at_s: float
    """Boot time."""
    done: float | None = None
    total: float | None = None
    message: str | None = None
    is_progress: bool = False
    blocks: bool = False
    """No sign of the job, but of the pulse: it has kept its event loop from turning since `at_s`."""
    noted: bool = False
    """No sign of the job, but of the pulse: the stacks are written; `token` is the number of the question."""


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(JobSignal)


class JobSignals:
    """The runner's end. One per process."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._sent_s: dict[int, float] = {}
        self._kept: dict[int, JobSignal] = {}
        self._noted = 0
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self._socket.fileno()

    def heartbeat(self, token: int) -> None:
        now_s = host.boottime_s()
        if now_s - self._sent_s.get(token, 0.0) >= LEAST_GAP_S:
            self._send(JobSignal(token, now_s))
        elif token not in self._kept:
            # With the lock: `forget` may be at work in another thread.
            with self._lock:
                self._kept.setdefault(token, JobSignal(token, now_s))

    def progress(self, token: int, done: float | None, total: float | None, message: str | None) -> None:
        now_s = host.boottime_s()
        text = None if message is None else storable_text(message, MAX_MESSAGE_CHARS)
        sign = JobSignal(token, now_s, done, total, text, True)
        if now_s - self._sent_s.get(token, 0.0) >= LEAST_GAP_S:
            self._send(sign)
        else:
            with self._lock:
                self._kept[token] = sign

    def blocked(self, token: int, since_s: float) -> None:
        """Say that a job keeps the event loop from turning; token 0 where it is not known who. Said again with
        every pulse, so that one which does not fit is no loss."""
        try:
            self._socket.send(_encode(JobSignal(token, since_s, blocks=True)))
        except OSError:
            pass

    def question(self) -> int | None:
        """Give the number of the next question of the worker, 0 where there is none; None when none will ever come."""
        try:
            packet = self._socket.recv(QUESTION.size)
        except BlockingIOError:
            return 0
        except OSError:
            return None
        return int(QUESTION.unpack(packet)[0]) if len(packet) == QUESTION.size else None

    def noted(self, number: int) -> None:
        """Say that the stacks are written which the worker asked for."""
        self._noted = number
        try:
            self._socket.send(_encode(JobSignal(number, host.boottime_s(), noted=True)))
            self._noted = 0
        except OSError:
            pass

    def flush(self) -> None:
        """Send what was kept; called with every pulse."""
        if self._noted:
            self.noted(self._noted)
        if self._kept:
            with self._lock:
                kept, self._kept = self._kept, {}
            for sign in kept.values():
                self._send(sign)

    def forget(self, token: int) -> None:
        """An attempt is over: what it still had to say does not matter any more."""
        if self._sent_s:
            with self._lock:
                self._sent_s.pop(token, None)
                self._kept.pop(token, None)

    def _send(self, sign: JobSignal) -> None:
        self._sent_s[sign.token] = sign.at_s
        try:
            self._socket.send(_encode(sign))
        except BlockingIOError:
            with self._lock:
                kept = self._kept.get(sign.token)
                if kept is None or (kept.at_s < sign.at_s and sign.is_progress):
                    self._kept[sign.token] = sign
                elif kept.at_s < sign.at_s:
                    kept.at_s = sign.at_s  # What it said of itself last is still to be told.
        except OSError:
            pass  # The worker is gone, and so shall we be in a moment.


def read_job_signals(sock: socket.socket, limit: int) -> list[JobSignal]:
    """Take up to `limit` signs out of the worker's end; what is no sign is passed over."""
    signals = []
    for _ in range(limit):
        try:
            packet = sock.recv(MAX_PACKET_BYTES, socket.MSG_DONTWAIT)
        except OSError:
            break
        if not packet:
            break
        try:
            signals.append(_decoder.decode(packet))
        except msgspec.MsgspecError:
            continue  # User code wrote into our descriptor.
    return signals


_answer_decoder = msgspec.msgpack.Decoder(JournalAnswer)
MAX_TELL_S = 1.0
CLOSED = "user code closed a descriptor that it had not opened, and with it the connection to the worker"


class _Latch:
    """What a job waits for in its own thread; the journal's thread opens it.

    No Event and no Future: those hold a lock in Python code, and a signal that raises there leaves it locked."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def open(self) -> None:
        with suppress(RuntimeError):  # It is open.
            self._lock.release()

    def wait(self, patience_s: float = -1) -> None:
        self._lock.acquire(timeout=patience_s)


class Unsent:
    """An entry on its way to the worker."""

    __slots__ = ("_over", "data")

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self._over = _Latch()

    @property
    def is_sent(self) -> bool:
        """All of it is in the socket: the worker can read it even if this process dies."""
        return not self.data

    def sent(self, size_bytes: int) -> None:
        self.data = self.data[size_bytes:]
        if not self.data:
            self.end()

    def end(self) -> None:
        """Let nothing wait for it any more."""
        self._over.open()

    def wait(self, patience_s: float) -> None:
        self._over.wait(patience_s)


def _open_pipe() -> tuple[int, int]:
    ends = os.pipe()
    for end in ends:
        os.set_blocking(end, False)
    return ends


class JournalChannel:
    """The runner's end. One per process.

    A thread of its own writes to the socket. User code runs in the main thread, where a signal may raise between any
    two instructions: an exception between a send and the note of how much was sent would tear the stream."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._identity = _identity(sock.fileno())
        self._pid = os.getpid()
        # Taken again by a handler of a signal that comes while it is held.
        self._lock = threading.RLock()
        self._unsent: deque[Unsent] = deque()
        self._stuck = False
        """The worker reads nothing at the moment: it was waited for once."""
        self._is_closed = False
        self._waiting: dict[int, Callable[[JournalAnswer], None]] = {}
        self._numbers = itertools.count(1)
        self._pipe: tuple[int, int] | None = None
        """It wakes the thread; None before the first entry."""
        self._serving = threading.Lock()
        """Held by the thread, so that there is only one."""

    def ask(self, token: int, entry: NewEntry) -> JournalAnswer:
        """Have an entry written, and return when it is durable, or when it is known that it cannot be."""
        answered = _Latch()
        found: list[JournalAnswer] = []

        def note(answer: JournalAnswer) -> None:
            found.append(answer)
            answered.open()

        self._request(token, entry, note)
        answered.wait()
        return found[0]

    async def ask_async(self, token: int, entry: NewEntry) -> JournalAnswer:
        """Like `ask`, without blocking the event loop."""
        future: Future[JournalAnswer] = Future()

        def note(answer: JournalAnswer) -> None:
            with suppress(InvalidStateError):  # Nobody waits any more: the job was cancelled.
                future.set_result(answer)

        self._request(token, entry, note)
        return await asyncio.wrap_future(future)

    def tell(self, token: int, entry: NewEntry) -> Unsent | None:
        """Hand an entry over; only the process that runs the job can. None if it will not be sent."""
        if os.getpid() != self._pid or self._is_closed:
            return None
        unsent = Unsent(memoryview(request_frame(JournalRequest(NO_ANSWER, token, entry))))
        self._unsent.append(unsent)
        self.wake()
        return unsent

    def wake(self) -> None:
        """Have sent what was handed over, if that is possible now."""
        # No thread may be started, or user code closed our descriptors: an error of a step, and not of a checkpoint.
        with suppress(RuntimeError, OSError):
            self._start()
            self._wake()

    def wait_for(self, unsent: Unsent) -> None:
        """Return once it is sent. Do not wait for a worker that reads nothing."""
        if not self._stuck:
            unsent.wait(MAX_TELL_S)
            self._stuck = not unsent.is_sent

    # ------------------------------------------------------------------------------------------

    def _request(self, token: int, entry: NewEntry, on_answer: Callable[[JournalAnswer], None]) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                "Only the process that runs a job can write down its steps, and this is a fork of it. Return the "
                "result to the job and call ctx.step there."
            )
        self._start()
        number = next(self._numbers)
        self._waiting[number] = on_answer
        self._unsent.append(Unsent(memoryview(request_frame(JournalRequest(number, token, entry)))))
        self._wake()
        if self._is_closed:
            self._refuse()

    def _start(self) -> None:
        with self._lock:
            if self._pipe is None:
                self._pipe = _open_pipe()
        if not self._serving.locked():
            # Two of them, or one that a signal kept from being started here, do no harm: one serves.
            threading.Thread(target=self._serve, args=self._pipe[:1], name="unstuck-journal", daemon=True).start()

    def _wake(self) -> None:
        assert self._pipe is not None
        try:
            os.write(self._pipe[1], b"\0")
        except BlockingIOError:
            pass  # full: then it wakes anyway

    def _serve(self, wake_in: int) -> None:
        if not self._serving.acquire(blocking=False):
            return
        buffer = FrameBuffer()
        poller = select.poll()
        poller.register(wake_in, select.POLLIN)
        while self._is_ours():
            self._flush()
            try:
                poller.register(self._socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            except (OSError, ValueError):
                break
            for fd, events in poller.poll():
                if fd == wake_in:
                    os.read(wake_in, 4096)
                elif events & ~select.POLLOUT and self._is_ours() and not self._receive(buffer):
                    return  # The worker is gone, and so shall we be in a moment: no answer will ever come.
        self._is_closed = True
        self._refuse()

    def _is_ours(self) -> bool:
        """User code may close descriptors that it did not open: the next file with that number is its own."""
        return self._identity is not None and _identity(self._socket.fileno()) == self._identity

    def _refuse(self) -> None:
        for number in list(self._waiting):
            if (on_answer := self._waiting.pop(number, None)) is not None:
                on_answer(JournalAnswer(number, REFUSED, CLOSED))
        for unsent in list(self._unsent):
            unsent.end()

    def _flush(self) -> None:
        while self._unsent:
            unsent = self._unsent[0]
            try:
                unsent.sent(self._socket.send(unsent.data))
            except BlockingIOError:
                return
            except OSError:
                unsent.end()  # The worker is gone, and so shall we be in a moment.
                self._unsent.popleft()
                continue
            if unsent.is_sent:
                self._unsent.popleft()
        self._stuck = False

    def _receive(self, buffer: FrameBuffer) -> bool:
        try:
            data = self._socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            data = b""
        for kind, body in buffer.feed(data):
            if kind == ANSWER:
                answer = _answer_decoder.decode(body)
                on_answer = self._waiting.pop(answer.number, None)
                if on_answer is not None:
                    on_answer(answer)
        return bool(data)


class StackWriter:
    """Questions come on the socket of the signs. Made before any job runs; used by the pulse alone."""

    def __init__(self, signals: JobSignals, stack_fd: int) -> None:
        self._signals = signals
        self._stack_fd = stack_fd
        # User code may close descriptors that it did not open: the next file with that number is its own.
        self._ours = {fd: _identity(fd) for fd in (signals.fileno(), stack_fd)}

    def fileno(self) -> int:
        return self._signals.fileno()

    def answer(self) -> bool:
        """Write down what was asked for; False when no more questions can come."""
        if not self._is_ours(self._signals.fileno()):
            return False
        number = self._signals.question()
        if number:
            # Straight after the call that took the GIL: for the next milliseconds nobody asks to have it back, and all
            # stacks are of one moment.
            text = stacks.of_threads()
            with suppress(OSError):
                if self._is_ours(self._stack_fd):
                    os.write(self._stack_fd, f"\n{text}\n".encode("utf-8", "backslashreplace"))
                    self._signals.noted(number)
        return number is not None

    def _is_ours(self, fd: int) -> bool:
        found = _identity(fd)
        return found is not None and found == self._ours.get(fd)


def _identity(fd: int) -> tuple[int, int] | None:
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    return found.st_dev, found.st_ino


MAX_INTERVAL_S = 1.0

Look = Callable[[float], Blocked | None]
"""Says whether the event loop of this process is blocked."""


def start_pulse(
    status_page: StatusPage,
    slot: int,
    interval_s: float,
    stream_fd: int,
    stack_fd: int,
    signals: JobSignals,
    look: Look | None,
    flush: Callable[[], None],
) -> None:
    """Begin the pulse in a thread of its own; with each, `flush` sends what was held back."""
    # The first one here, before any job: who dies without it began none, and who gave it may have, even if a job never
    # lets go of the interpreter again.
    status_page.pulse(slot, host.boottime_s())
    # Here too: a job that is quicker than the thread may put a file of its own in the place of ours.
    answering = StackWriter(signals, stack_fd)
    arguments = (
        status_page,
        slot,
        min(interval_s, MAX_INTERVAL_S),
        stream_fd,
        stack_fd,
        signals,
        answering,
        look,
        flush,
    )
    threading.Thread(target=_beat, args=arguments, name="unstuck-monitor", daemon=True).start()


def _beat(
    status_page: StatusPage,
    slot: int,
    interval_s: float,
    stream_fd: int,
    stack_fd: int,
    signals: JobSignals,
    answering: StackWriter,
    look: Look | None,
    flush: Callable[[], None],
) -> None:
    poller = select.poll()
    poller.register(stream_fd, 0)  # hang-up alone: the worker closed its end, or died
    poller.register(answering, select.POLLIN)
    watched = {stream_fd, answering.fileno()}
    while True:
        now_s = host.boottime_s()
        kill_at_s = status_page.kill_at_s(slot)
        if kill_at_s and now_s >= kill_at_s:
            _die()
        status_page.pulse(slot, now_s)
        signals.flush()
        flush()
        if look is not None and (blocked := look(now_s)) is not None:
            signals.blocked(blocked.token, blocked.since_s)
        stacks.put_in_order(stack_fd)
        if not watched:
            time.sleep(interval_s)
            continue
        for fd, event in poller.poll(interval_s * 1000):
            if fd == stream_fd and not event & select.POLLNVAL:
                _die()
            if fd == stream_fd or not answering.answer():
                # User code closed our descriptor; the fork server still watches over us, and there are signals.
                watched.discard(fd)
                poller.unregister(fd)


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    os._exit(1)
