"""Wake workers on the same host: a datagram socket per worker, rung without blocking."""

import hashlib
import os
import select
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

WORDS_BYTES = 60_000
CACHE_S = 1.0
_ABSTRACT = "@"
_HAS_ABSTRACT_NAMES = sys.platform.startswith("linux")

ListenerAddresses = list[tuple[str | None, str, frozenset[str]]]
"""(worker id, address, queues it serves); without an id it is somebody who hears every word."""


def listener_address(ledger: Path, worker_id: str) -> str:
    """Name a worker's bell: in the kernel's own name space on Linux, where no file can be left behind."""
    name = hashlib.sha256(f"{ledger}\0{worker_id}".encode()).hexdigest()[:40]
    if _HAS_ABSTRACT_NAMES:
        return f"{_ABSTRACT}unstuck-{name}"
    return str(Path(tempfile.gettempdir()) / f"unstuck-{name}.bell")


def _sockaddr(address: str) -> str:
    return "\0" + address[1:] if address.startswith(_ABSTRACT) else address


def reaches(address: str) -> bool:
    """Say whether somebody hears this bell, without ringing it: containers may share a file and not its bells."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(_sockaddr(address))
        except OSError:
            return False
        return True


class SqliteListener:
    """A worker's own bell."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        if not address.startswith(_ABSTRACT):
            Path(address).unlink(missing_ok=True)
        self._socket.bind(_sockaddr(address))
        # A pipe of our own and not a datagram to ourselves: a full bell must not swallow an interrupt.
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._closed = False

    def wait(self, timeout_s: float) -> frozenset[str]:
        if self._closed:
            return frozenset()
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        poll.poll(max(timeout_s, 0.0) * 1000)
        self._drain_interrupts()
        return self._collect()

    def interrupt(self) -> None:
        try:
            os.write(self._wake_write, b"!")
        except OSError:
            # Full means that a wake-up is on its way already; closed means that nobody waits.
            pass

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._socket.close()
        os.close(self._wake_read)
        os.close(self._wake_write)
        if not self.address.startswith(_ABSTRACT):
            Path(self.address).unlink(missing_ok=True)

    def _drain_interrupts(self) -> None:
        try:
            while os.read(self._wake_read, 512):
                pass
        except OSError:
            pass

    def _collect(self) -> frozenset[str]:
        words: set[str] = set()
        try:
            while True:
                words.update(self._socket.recv(65_536).decode("utf-8", "replace").split("\n"))
        except OSError:
            return frozenset(words - {""})


class Notifier:
    """Ring the bells of the workers that a word concerns."""

    def __init__(self, find_bells: Callable[[], ListenerAddresses]) -> None:
        self._find_addresses = find_bells
        self.forget()

    def forget(self) -> None:
        """Begin anew, as after a fork."""
        self._guard = threading.Lock()
        self._socket: socket.socket | None = None
        self._addresses: ListenerAddresses = []
        self._known_until = 0.0

    def look_again(self) -> None:
        """Read the list of bells anew before the next ring: one was added."""
        with self._guard:
            self._known_until = 0.0

    def notify(self, words: Iterable[str]) -> None:
        """Best effort: a bell that cannot be rung costs its worker one poll interval."""
        wanted = frozenset(words)
        if not wanted:
            return
        with self._guard:
            if time.monotonic() >= self._known_until:
                self._addresses = self._find_addresses()
                self._known_until = time.monotonic() + CACHE_S
            if self._socket is None:
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                self._socket.setblocking(False)
            for worker_id, address, queues in self._addresses:
                concerned = [word for word in wanted if _concerns(word, worker_id, queues)]
                if concerned:
                    self._send(address, "\n".join(concerned).encode()[:WORDS_BYTES])

    def notify_queues(self, queues: Iterable[str]) -> None:
        """Wake the workers that serve these queues, after the commit that made jobs ready there."""
        if words := [f"queue:{queue}" for queue in queues]:
            self.notify(words)

    def close(self) -> None:
        with self._guard:
            if self._socket is not None:
                self._socket.close()
                self._socket = None
            self._known_until = 0.0

    def _send(self, address: str, data: bytes) -> None:
        assert self._socket is not None
        try:
            self._socket.sendto(data, _sockaddr(address))
        except OSError:
            # Gone, or so full of wake-ups that one more makes no difference.
            pass


def _concerns(word: str, worker_id: str | None, queues: frozenset[str]) -> bool:
    if worker_id is None:
        return True
    kind, _, name = word.partition(":")
    match kind:
        case "queue":
            return name in queues
        case "worker":
            return name == worker_id
        case _:
            return True
