"""Carry what jobs write down to the worker, and its answers back: from any thread, without blocking an event loop.

Requests have numbers, and a small thread of this process matches the answers. It starts with the first request: most
jobs write nothing down.
"""

import itertools
import os
import select
import socket
import threading
from collections import deque
from concurrent.futures import Future, InvalidStateError

import msgspec

from unstuck.runner.pausing import Written
from unstuck.runner.wire import ANSWER, ENTRY, RECEIVE_BYTES, FrameBuffer, frame

NO_ANSWER = 0
"""The number of a request whose answer nobody waits for."""
WRITTEN, SUPERSEDED, REFUSED = 0, 1, 2


class Request(msgspec.Struct, array_like=True, gc=False):
    number: int
    token: int
    entry: Written


class Answer(msgspec.Struct, array_like=True, gc=False):
    number: int
    verdict: int
    reason: str = ""


_encode = msgspec.msgpack.Encoder().encode
_answers = msgspec.msgpack.Decoder(Answer)
requests = msgspec.msgpack.Decoder(Request)


def request_frame(request: Request) -> bytes:
    return frame(ENTRY, _encode(request))


def answer_frame(answer: Answer) -> bytes:
    return frame(ANSWER, _encode(answer))


class Line:
    """The runner's end. One per process."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._unsent: deque[memoryview] = deque()
        self._waiting: dict[int, Future[Answer]] = {}
        self._numbers = itertools.count(1)
        self._wake: tuple[int, int] | None = None
        """A pipe that wakes the thread; None before it started."""

    def ask(self, token: int, entry: Written) -> Future[Answer]:
        """Have an entry written; the answer comes when it is durable, or when it is known that it cannot be."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                "Only the process that runs a job can write down its steps, and this is a fork of it. Return the "
                "result to the job and call ctx.step there."
            )
        future: Future[Answer] = Future()
        number = next(self._numbers)
        with self._lock:
            self._waiting[number] = future
            self._start()
            self._send(request_frame(Request(number, token, entry)))
        return future

    def tell(self, token: int, entry: Written) -> None:
        """Hand an entry over and go on; only the process that runs the job can."""
        if os.getpid() == self._pid:
            with self._lock:
                self._send(request_frame(Request(NO_ANSWER, token, entry)))

    # ------------------------------------------------------------------------------------------

    def _send(self, data: bytes) -> None:
        """Send what goes, with the lock held; the thread sends the rest."""
        self._unsent.append(memoryview(data))
        if len(self._unsent) == 1:
            self._flush()
        if self._unsent:
            try:
                os.write(self._start()[1], b"\0")
            except BlockingIOError:
                pass  # full: then it wakes anyway

    def _flush(self) -> None:
        while self._unsent:
            try:
                sent = self._socket.send(self._unsent[0])
            except BlockingIOError:
                return
            except OSError:
                self._unsent.clear()  # The worker is gone, and so shall we be in a moment.
                return
            if sent == len(self._unsent[0]):
                self._unsent.popleft()
            else:
                self._unsent[0] = self._unsent[0][sent:]

    def _start(self) -> tuple[int, int]:
        if self._wake is None:
            wake_in, wake_out = os.pipe()
            os.set_blocking(wake_in, False)
            os.set_blocking(wake_out, False)
            self._wake = (wake_in, wake_out)
            threading.Thread(target=self._serve, args=(wake_in,), name="unstuck-line", daemon=True).start()
        return self._wake

    def _serve(self, wake_in: int) -> None:
        buffer = FrameBuffer()
        poller = select.poll()
        poller.register(wake_in, select.POLLIN)
        while True:
            poller.register(self._socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            for fd, events in poller.poll():
                if fd == wake_in:
                    os.read(wake_in, 4096)
                elif events & ~select.POLLOUT and not self._receive(buffer):
                    return
            with self._lock:
                self._flush()

    def _receive(self, buffer: FrameBuffer) -> bool:
        try:
            data = self._socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            data = b""
        for kind, body in buffer.feed(data):
            if kind == ANSWER:
                answer = _answers.decode(body)
                with self._lock:
                    future = self._waiting.pop(answer.number, None)
                try:
                    if future is not None:
                        future.set_result(answer)
                except InvalidStateError:
                    pass  # Nobody waits any more: the job was cancelled.
        return bool(data)
