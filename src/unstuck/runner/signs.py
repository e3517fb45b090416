"""Carry signs of the logic from user code to the worker: one small packet each, from any thread, never blocking.

Signs have a socket of their own, so that they neither wait behind results nor need a lock. A sign that does not
fit, or comes too soon after the last one, is kept and sent with the next pulse: the newest always arrives.
"""

import socket
import struct
import threading

import msgspec

from unstuck import host
from unstuck.domain.recovery import printable

MAX_MESSAGE_CHARS = 500
MAX_PACKET_BYTES = 4096
LEAST_GAP_S = 0.02
"""A loop that calls `ctx.heartbeat()` a million times a second must not pay for a million packets."""
QUESTION = struct.Struct("=q")
"""The only packet that goes the other way: where do your threads stand? With a number, for the answer."""


class Sign(msgspec.Struct, array_like=True, gc=False):
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
_decoder = msgspec.msgpack.Decoder(Sign)


class Signs:
    """The runner's end. One per process."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._sent_s: dict[int, float] = {}
        self._kept: dict[int, Sign] = {}
        self._noted = 0
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self._socket.fileno()

    def heartbeat(self, token: int) -> None:
        now_s = host.boottime_s()
        if now_s - self._sent_s.get(token, 0.0) >= LEAST_GAP_S:
            self._send(Sign(token, now_s))
        elif token not in self._kept:
            # With the lock: `forget` may be at work in another thread.
            with self._lock:
                self._kept.setdefault(token, Sign(token, now_s))

    def progress(self, token: int, done: float | None, total: float | None, message: str | None) -> None:
        now_s = host.boottime_s()
        text = None if message is None else printable(message, MAX_MESSAGE_CHARS)
        sign = Sign(token, now_s, done, total, text, True)
        if now_s - self._sent_s.get(token, 0.0) >= LEAST_GAP_S:
            self._send(sign)
        else:
            with self._lock:
                self._kept[token] = sign

    def blocked(self, token: int, since_s: float) -> None:
        """Say that a job keeps the event loop from turning; token 0 where it is not known who. Said again with
        every pulse, so that one which does not fit is no loss."""
        try:
            self._socket.send(_encode(Sign(token, since_s, blocks=True)))
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
            self._socket.send(_encode(Sign(number, host.boottime_s(), noted=True)))
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

    def _send(self, sign: Sign) -> None:
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


def read_signs(sock: socket.socket, limit: int) -> list[Sign]:
    """Take up to `limit` signs out of the worker's end; what is no sign is passed over."""
    signs = []
    for _ in range(limit):
        try:
            packet = sock.recv(MAX_PACKET_BYTES, socket.MSG_DONTWAIT)
        except OSError:
            break
        if not packet:
            break
        try:
            signs.append(_decoder.decode(packet))
        except msgspec.MsgspecError:
            continue  # User code wrote into our descriptor.
    return signs
