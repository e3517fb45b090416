"""Open the socket of a peer towards a broker, with or without CURVE."""

import secrets
from dataclasses import dataclass

import zmq

from unstuck.domain.errors import ConfigError
from unstuck.mdp.frames import LEAST_IDENTITY_BYTES

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


def open_dealer(
    context: "zmq.Context[zmq.Socket[bytes]]",
    endpoint: str,
    keys: CurveKeys | None,
    identity: bytes | None = None,
    max_reconnect_ms: int = MAX_WORKER_RECONNECT_MS,
) -> "zmq.Socket[bytes]":
    """Begin to connect; whoever listens comes later. Raises `ConfigError` for an address that can be none."""
    socket = context.socket(zmq.DEALER)
    try:
        socket.linger = 0
        # What waits in it is limited by who uses it, so that a full one never blocks.
        socket.sndhwm = 0
        socket.rcvhwm = MAX_UNREAD
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, max_reconnect_ms)
        if identity is not None:
            socket.routing_id = identity
        if keys is not None:
            _wear(socket, keys)
        socket.connect(endpoint)
    except (zmq.ZMQError, TypeError, ValueError) as error:
        socket.close(linger=0)
        raise ConfigError(
            f"Cannot connect to {endpoint!r}: {error}. An endpoint is like tcp://127.0.0.1:5555."
        ) from error
    return socket


def _wear(socket: "zmq.Socket[bytes]", keys: CurveKeys) -> None:
    public, secret = keys.public_key, keys.secret_key
    if public is None or secret is None:
        public, secret = zmq.curve_keypair()
    socket.curve_serverkey = _ascii(keys.server_key)
    socket.curve_publickey = _ascii(public)
    socket.curve_secretkey = _ascii(secret)


def _ascii(key: str | bytes) -> bytes:
    return key.encode("ascii") if isinstance(key, str) else key
