"""Hear from the workers of a supervisor, in sd_notify's words: that they are ready, alive or leaving."""

import os
import secrets
import socket
import struct
import sys
from collections.abc import Iterator

_CREDENTIALS = struct.Struct("3i")
MAX_REPORT_BYTES = 4096
MAX_REPORTS = 1_000
PERIOD_S = 60.0
"""Workers give a sign of life twice in this time."""


class Reports:
    """A socket without a file. The kernel says who speaks, so nobody speaks for another."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._name = f"unstuck-{os.getpid()}-{secrets.token_hex(8)}"
        if sys.platform == "linux":
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.setblocking(False)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self._socket.bind("\0" + self._name)

    @property
    def possible(self) -> bool:
        """False where the system has no such sockets: then a worker that runs counts as ready."""
        return self._socket is not None

    def environment(self) -> dict[str, str]:
        """Give what a worker must know to report here."""
        if self._socket is None:
            return {}
        return {"NOTIFY_SOCKET": f"@{self._name}", "WATCHDOG_USEC": str(int(PERIOD_S * 1e6))}

    def descriptors(self) -> list[int]:
        return [] if self._socket is None else [self._socket.fileno()]

    def take(self) -> Iterator[tuple[int, frozenset[str]]]:
        """Give what came since the last look: who (by pid), and the lines that they said."""
        for _ in range(MAX_REPORTS if self._socket is not None else 0):
            assert self._socket is not None
            try:
                said, about, _, _ = self._socket.recvmsg(MAX_REPORT_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
            except OSError:
                return
            for level, kind, data in about:
                if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                    pid = _CREDENTIALS.unpack(data[: _CREDENTIALS.size])[0]
                    yield pid, frozenset(said.decode(errors="replace").splitlines())

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
