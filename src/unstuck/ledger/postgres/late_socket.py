"""Keep the socket of a connection whose answer is late, so that the server does not take its end for the worker's.

The session of a worker is evidence of its life. A worker that waited in vain for an answer gives the connection up and
opens another one, which may take a while: the network may be cut, or the server may refuse. If the socket were closed
meanwhile, the server would end the session, and a living worker would look like one that was killed.
"""

import os
import socket
from contextlib import suppress


class LateSocket:
    """At most one socket that is left open and never used again; the kernel closes it if this process dies."""

    def __init__(self) -> None:
        self._kept: socket.socket | None = None

    def keep(self, taken: socket.socket | None) -> None:
        """Leave this one open instead of an earlier one."""
        if taken is not None:
            self.close()
            self._kept = taken

    def close(self) -> None:
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.close()

    def __del__(self) -> None:
        self.close()


def take_socket(fd: int) -> socket.socket | None:
    """Take the socket away from the driver, which says goodbye to the server when it closes a connection.

    The driver is left with another socket that leads nowhere. Return None if that cannot be done."""
    with suppress(OSError):
        taken = socket.socket(fileno=os.dup(fd))
        try:
            nowhere, other_end = socket.socketpair()
            with nowhere, other_end:
                os.dup2(nowhere.fileno(), fd, inheritable=False)
        except OSError:
            taken.close()
            return None
        return taken
    return None
