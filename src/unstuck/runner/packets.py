"""Carry control messages and descriptors between worker and fork server, without ever blocking either.

A frozen worker must not stop the fork server from enforcing leases, and a busy fork server must not stop the
worker's loop: what the socket does not take waits here.
"""

import array
import errno
import os
import socket
import struct
from collections import deque
from collections.abc import Sequence

_LENGTH = struct.Struct("=II")  # bytes, descriptors
_MAX_FDS = 64
_RECEIVE_BYTES = 64 * 1024
MAX_MESSAGE_BYTES = 64 * 1024 * 1024


class Channel:
    """One end of a stream socket that carries whole messages with descriptors."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._out: deque[tuple[memoryview, list[int]]] = deque()
        self._data = bytearray()
        self._fds: deque[int] = deque()
        self.ended = False

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: bytes, fds: Sequence[int] = ()) -> None:
        """Queue a message and send what goes. The descriptors are duplicated: the caller keeps its own."""
        self._out.append((memoryview(_LENGTH.pack(len(message), len(fds)) + message), [os.dup(fd) for fd in fds]))
        self.flush()

    def wants_write(self) -> bool:
        return bool(self._out) and not self.ended

    def flush(self) -> None:
        while self._out:
            data, fds = self._out[0]
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            try:
                sent = self._socket.sendmsg([data], rights)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.ETOOMANYREFS:  # descriptors in flight are limited; they drain as they are read
                    return
                self._drop_out()
                return
            for fd in fds:
                os.close(fd)
            if sent == len(data):
                self._out.popleft()
            else:
                self._out[0] = (data[sent:], [])

    def receive(self) -> list[tuple[bytes, list[int]]]:
        """Give every complete message that is there; sets `ended` when the other side is gone."""
        self._fill()
        messages = []
        at = 0
        while len(self._data) - at >= _LENGTH.size:
            length, count = _LENGTH.unpack_from(self._data, at)
            if length > MAX_MESSAGE_BYTES or count > _MAX_FDS:
                self.ended = True
                break
            stop = at + _LENGTH.size + length
            if stop > len(self._data) or count > len(self._fds):
                break
            messages.append((bytes(self._data[at + _LENGTH.size : stop]), [self._fds.popleft() for _ in range(count)]))
            at = stop
        del self._data[:at]
        return messages

    def close(self) -> None:
        self.ended = True
        self._drop_out()
        while self._fds:
            os.close(self._fds.popleft())
        self._socket.close()

    def _fill(self) -> None:
        space = socket.CMSG_SPACE(_MAX_FDS * 4)
        while not self.ended:
            try:
                data, extra, _, _ = self._socket.recvmsg(_RECEIVE_BYTES, space, getattr(socket, "MSG_CMSG_CLOEXEC", 0))
            except BlockingIOError:
                return
            except OSError:
                data, extra = b"", []
            for level, kind, payload in extra:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    fds = array.array("i")
                    fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
                    self._fds.extend(fds)
            if not data:
                self.ended = True
            self._data += data

    def _drop_out(self) -> None:
        while self._out:
            for fd in self._out.popleft()[1]:
                os.close(fd)
