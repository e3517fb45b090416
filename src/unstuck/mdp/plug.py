"""A socket of a peer, with the monitor that sees its connection come and go. Of one thread alone."""

import zmq
from zmq.utils.monitor import recv_monitor_message

from unstuck.mdp.sockets import MAX_WORKER_RECONNECT_MS, SEEN, CurveKeys, open_dealer


class Plug:
    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        endpoint: str,
        keys: CurveKeys | None,
        identity: bytes | None = None,
        max_reconnect_ms: int = MAX_WORKER_RECONNECT_MS,
    ) -> None:
        self.socket = open_dealer(context, endpoint, keys, identity, max_reconnect_ms)
        self._monitor = self.socket.get_monitor_socket(SEEN)
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
