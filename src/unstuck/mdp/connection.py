"""A DEALER socket to a broker, with CURVE keys and a monitor of its connection."""

import secrets
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from unstuck.errors import ConfigError
from unstuck.mdp.protocol import LEAST_IDENTITY_BYTES

RECONNECT_MS = 100
MAX_CLIENT_RECONNECT_MS = 1_000
"""Somebody waits for a client, and may not wait long."""
MAX_WORKER_RECONNECT_MS = 32_000
MAX_UNREAD = 10_000
"""Messages that a peer did not read yet; the broker waits with the others."""
SEEN = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED


@dataclass(frozen=True)
class CurveKeys:
    """Keys in Z85, as `unstuck keygen` writes them: the broker's public one, and a pair of our own.

    Without a pair one is made up, which a broker that admits only keys of its list refuses."""

    server_key: str | bytes
    public_key: str | bytes | None = None
    secret_key: str | bytes | None = None

    def __post_init__(self) -> None:
        if (self.public_key is None) != (self.secret_key is None):
            raise ConfigError("CURVE keys come in pairs: give public_key and secret_key, or neither.")


def new_identity() -> bytes:
    """Make up a routing id that nobody else has; it never begins with a zero byte, as automatic ones do."""
    return b"u" + secrets.token_bytes(LEAST_IDENTITY_BYTES)


def set_curve_keys(socket: "zmq.Socket[bytes]", keys: CurveKeys) -> None:
    public, secret = keys.public_key, keys.secret_key
    if public is None or secret is None:
        public, secret = zmq.curve_keypair()
    socket.curve_serverkey = _ascii(keys.server_key)
    socket.curve_publickey = _ascii(public)
    socket.curve_secretkey = _ascii(secret)


def _ascii(key: str | bytes) -> bytes:
    return key.encode("ascii") if isinstance(key, str) else key


class DealerConnection:
    """Begins to connect when it is made, and goes on until the broker is there. Raises `ConfigError` for an address
    that can be none."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        endpoint: str,
        keys: CurveKeys | None,
        identity: bytes | None = None,
        max_reconnect_ms: int = MAX_WORKER_RECONNECT_MS,
    ) -> None:
        self.socket = context.socket(zmq.DEALER)
        # Before it connects: else the first event could be missed.
        self._monitor = self.socket.get_monitor_socket(SEEN)
        try:
            self.socket.linger = 0
            # What waits in it is limited by who uses it, so that a full one never blocks.
            self.socket.sndhwm = 0
            self.socket.rcvhwm = MAX_UNREAD
            self.socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
            self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, max_reconnect_ms)
            if identity is not None:
                self.socket.routing_id = identity
            if keys is not None:
                set_curve_keys(self.socket, keys)
            self.socket.connect(endpoint)
        except (zmq.ZMQError, TypeError, ValueError) as error:
            self.close()
            raise ConfigError(
                f"Cannot connect to {endpoint!r}: {error}. An endpoint is like tcp://127.0.0.1:5555."
            ) from error
        self._poller = zmq.Poller()
        self._poller.register(self.socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def watch(self, fd: int) -> None:
        """Wake up for this one too."""
        self._poller.register(fd, zmq.POLLIN)

    def wait(self, wait_s: float | None) -> None:
        """Sleep until something can be read, or for so long."""
        # Rounded up: waking before the time would mean to wake several times.
        self._poller.poll(None if wait_s is None else int(1000 * max(0.0, wait_s)) + 1)

    def send(self, frames: list[bytes]) -> None:
        self.socket.send_multipart(frames, zmq.NOBLOCK)

    def receive(self) -> list[bytes] | None:
        """Give the next message; None where there is none yet."""
        try:
            return self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def changes(self) -> list[bool]:
        """Say what became of the connection since the last look: True for come, False for gone, in order."""
        seen = []
        while self._monitor.poll(0):
            seen.append(recv_monitor_message(self._monitor)["event"] == zmq.Event.HANDSHAKE_SUCCEEDED)
        return seen

    def close(self, linger_ms: int = 0) -> None:
        self.socket.disable_monitor()
        self._monitor.close(linger=0)
        self.socket.close(linger=linger_ms)
