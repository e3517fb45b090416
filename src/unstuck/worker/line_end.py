"""The worker's end of a runner's line: read what its jobs write down, and tell them what became of it. Never blocks."""

import socket
import struct
from collections import deque

import msgspec

from unstuck.runner import wire
from unstuck.runner.line import NO_ANSWER, Answer, Request, answer_frame, requests

MAX_READ_BYTES = 64 * 1024 * 1024
"""Read at one time: a flood waits for the next."""


class LineEnd:
    def __init__(self) -> None:
        self.socket, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.setblocking(False)
        self._buffer = wire.FrameBuffer()
        self._unsent: deque[memoryview] = deque()
        self.closed = False

    @property
    def their_fd(self) -> int:
        return self._theirs.fileno()

    def handed_over(self) -> None:
        self._theirs.close()

    def read(self) -> list[Request]:
        """Give what came; what is no request ends the line, for user code wrote into our descriptor."""
        found: list[Request] = []
        size_bytes = 0
        while not self.closed and size_bytes < MAX_READ_BYTES:
            try:
                data = self.socket.recv(wire.RECEIVE_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.closed = True
                break
            size_bytes += len(data)
            try:
                found += [requests.decode(body) for kind, body in self._buffer.feed(data) if kind == wire.ENTRY]
            except (wire.CorruptStream, msgspec.MsgspecError, struct.error):
                self.closed = True
        return found

    def answer(self, number: int, verdict: int, reason: str = "") -> None:
        if number != NO_ANSWER and not self.closed:
            self._unsent.append(memoryview(answer_frame(Answer(number, verdict, reason))))
            self.flush()

    def wants_write(self) -> bool:
        return bool(self._unsent) and not self.closed

    def flush(self) -> None:
        while self._unsent and not self.closed:
            try:
                sent = self.socket.send(self._unsent[0])
            except BlockingIOError:
                return
            except OSError:
                self._unsent.clear()
                return
            if sent == len(self._unsent[0]):
                self._unsent.popleft()
            else:
                self._unsent[0] = self._unsent[0][sent:]

    def close(self) -> None:
        self.closed = True
        self.socket.close()
        self._theirs.close()
