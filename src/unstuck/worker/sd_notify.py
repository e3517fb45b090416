"""Speak the sd_notify protocol to systemd or our own supervisor, and receive it as a supervisor.

The protocol is sd_notify's, and so is the meaning of the variables. They are taken out of the environment on the way
in: nothing that we start, and least of all user code, may speak in our name.
"""

import os
import secrets
import socket
import struct
from collections.abc import Iterator, MutableMapping

from unstuck import host

SEND_PATIENCE_S = 0.5
MAX_STATUS_CHARS = 200
VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


class SdNotifier:
    """Says what it is told, and never fails: whoever does not listen misses it. Without an address it is silent."""

    def __init__(self, address: str = "", watchdog_s: float | None = None) -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self.watchdog_s = watchdog_s
        """How long we may be silent before we are taken for hung; None where nobody watches."""
        self._status = ""
        self._ready = self._stopping = False
        self._pinged_s = float("-inf")

    @property
    def heard(self) -> bool:
        """Somebody wants to know."""
        return bool(self._address)

    def ready(self, status: str = "") -> None:
        """Say once that the start is over."""
        if not self._ready:
            self._ready = True
            self._send("READY=1", *self._news(status))

    def stopping(self, status: str = "") -> None:
        """Say once that the end has begun."""
        if not self._stopping:
            self._stopping = True
            self._send("STOPPING=1", *self._news(status))

    def status(self, text: str) -> None:
        """Say how we are in a line for people, where that is news."""
        if news := self._news(text):
            self._send(*news)

    def alive(self) -> None:
        """Give a sign of life, at most twice per period; only for those who know that the loops really turn."""
        now_s = host.boottime_s()
        if self.watchdog_s is not None and now_s - self._pinged_s >= self.watchdog_s / 2:
            self._pinged_s = now_s
            self._send("WATCHDOG=1")

    def _news(self, status: str) -> list[str]:
        line = " ".join(status.split())[:MAX_STATUS_CHARS]
        if not line or line == self._status:
            return []
        self._status = line
        return [f"STATUS={line}"]

    def _send(self, *lines: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
                to.settimeout(SEND_PATIENCE_S)
                to.sendto("\n".join(lines).encode(), self._address)
        except OSError:
            # Gone, full or restarting: no reason to stop working.
            pass


def take_sd_notifier(environment: MutableMapping[str, str] | None = None) -> SdNotifier:
    """Make the herald that the environment asks for, and leave no trace of it there."""
    place = os.environ if environment is None else environment
    address, period_us, pid = (place.pop(name, "") for name in VARIABLES)
    if address[:1] not in ("/", "@"):
        return SdNotifier()
    ours = not pid or pid == str(os.getpid())
    return SdNotifier(address, int(period_us) / 1e6 if ours and period_us.isdigit() and int(period_us) else None)


_CREDENTIALS = struct.Struct("3i")
MAX_REPORT_BYTES = 4096
MAX_REPORTS = 1_000
PERIOD_S = 60.0
"""Workers give a sign of life twice in this time."""


class SdListener:
    """A socket without a file. The kernel says who speaks, so nobody speaks for another."""

    def __init__(self) -> None:
        self._name = f"unstuck-{os.getpid()}-{secrets.token_hex(8)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind("\0" + self._name)

    def environment(self) -> dict[str, str]:
        """Give what a worker must know to report here."""
        return {"NOTIFY_SOCKET": f"@{self._name}", "WATCHDOG_USEC": str(int(PERIOD_S * 1e6))}

    def fileno(self) -> int:
        return self._socket.fileno()

    def take(self) -> Iterator[tuple[int, frozenset[str]]]:
        """Give what came since the last look: who (by pid), and the lines that they said."""
        for _ in range(MAX_REPORTS):
            try:
                said, about, _, _ = self._socket.recvmsg(MAX_REPORT_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
            except OSError:
                return
            for level, kind, data in about:
                if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                    pid = _CREDENTIALS.unpack(data[: _CREDENTIALS.size])[0]
                    yield pid, frozenset(said.decode(errors="replace").splitlines())

    def close(self) -> None:
        self._socket.close()
