"""Peers of the guide, frame by frame as their languages send them. Their assertions are kept."""

from collections.abc import Callable
from dataclasses import dataclass

import zmq
from tests.mdp.broker import CLIENT, DISCONNECT, HEARTBEAT, READY, REPLY, REQUEST, Peers, Raw
from tests.support.fleet import TIMEOUT_S

from unstuck.config import Settings
from unstuck.ledger.contract.jobs import JobFilter, JobRecord
from unstuck.ledger.open import ready_ledger


@dataclass(frozen=True)
class Shape:
    """How a language writes the frames of a reply."""

    name: str
    reply: Callable[[bytes, list[bytes]], list[bytes]]


SHAPES = [
    Shape("python", lambda address, body: [address, b"", *body]),
    # zmsg_wrap puts an empty frame behind the address. A reply without frames is legal there.
    Shape("c", lambda address, body: [address, b"", *body]),
    # Zmsg::wrap puts one there only if it is asked to, and mdwrkapi.php does not ask.
    Shape("php", lambda address, body: [address, *body]),
]


class GuideWorker(Raw):
    """A worker of the guide: beats when it is idle, and opens a new socket when it is sent away."""

    def __init__(self, peers: Peers, shape: Shape) -> None:
        self.shape, self.service, self.endpoint = shape, peers.service, peers.broker.endpoint
        super().__init__(self.endpoint)
        peers.made.append(self)
        self.send(READY, [self.service])

    def send(self, command: bytes, rest: list[bytes]) -> None:
        self.say(b"", b"MDPW01", command, *rest)

    def recv(self, patience_s: float = TIMEOUT_S) -> list[bytes]:
        """Return the body of the next request."""
        while True:
            body = self.take(patience_s)
            if body is not None:
                return body

    def take(self, patience_s: float = TIMEOUT_S) -> list[bytes] | None:
        """Take the next message. Return the body if it is a request, and answer it if it is none."""
        frames = self.hear(patience_s)
        assert len(frames) >= 3
        assert frames.pop(0) == b""
        assert frames.pop(0) == b"MDPW01"
        command = frames.pop(0)
        if command == REQUEST:
            # As zmsg_unwrap does: the empty frame is taken away if it is there.
            self.reply_to = frames.pop(0)
            if frames and frames[0] == b"":
                frames.pop(0)
            return frames
        if command == DISCONNECT:
            self.reconnect()
        else:
            assert command == HEARTBEAT, command
            self.send(HEARTBEAT, [])
        return None

    def reply(self, *body: bytes) -> None:
        self.send(REPLY, self.shape.reply(self.reply_to, list(body)))

    def reconnect(self) -> None:
        self.socket.close(linger=0)
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 2000
        self.socket.connect(self.endpoint)
        self.send(READY, [self.service])


class GuideClient(Raw):
    """`mdcliapi` (REQ, one request at a time) or `mdcliapi2` (DEALER, many)."""

    def __init__(self, peers: Peers, kind: int) -> None:
        self.service = peers.service
        super().__init__(peers.broker.endpoint)
        peers.made.append(self)
        if kind == zmq.REQ:
            self.socket.close(linger=0)
            self.socket = self.context.socket(zmq.REQ)
            self.socket.connect(peers.broker.endpoint)
        self.kind = kind

    def send(self, *body: bytes) -> None:
        self.say(*([] if self.kind == zmq.REQ else [b""]), CLIENT, self.service, *body)

    def recv(self) -> list[bytes]:
        frames = self.hear()
        if self.kind == zmq.DEALER:
            assert len(frames) >= 4
            assert frames.pop(0) == b""
        assert len(frames) >= 3
        assert frames.pop(0) == CLIENT
        assert frames.pop(0) == self.service
        return frames


def jobs(peers: Peers) -> list[JobRecord]:
    """Return the jobs of the service, as the ledger has them."""
    ledger = ready_ledger(Settings(url=peers.broker.url))
    try:
        found = ledger.jobs.list(JobFilter(task=peers.service.decode(), limit=100))
        return [record for job in found if (record := ledger.jobs.get(job.id)) is not None]
    finally:
        ledger.close()
