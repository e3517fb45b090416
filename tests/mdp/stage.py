"""The stage of the tests: foreign brokers and peers as processes, and a broker of ours played frame by frame."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import cbor2
import zmq
from tests import forked
from tests.fleet import PATIENCE_S, ROOT


@contextmanager
def running(*words: object) -> "Iterator[subprocess.Popen[str]]":
    """Run a module of ours as a process, and end it."""
    process = forked.start(*map(str, words), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def line_of(stream: IO[str] | None) -> str:
    assert stream is not None
    return stream.readline().strip()


@contextmanager
def foreign_broker(bind: str = "tcp://127.0.0.1:*", heartbeat_s: float = 2.5) -> Iterator[str]:
    """Run a strict broker of plain 0.1, and see in the end that nothing broke it."""
    with running("tests.mdp.reference", "--bind", bind, "--heartbeat", heartbeat_s) as process:
        endpoint = line_of(process.stdout)
        assert endpoint, process.communicate()
        yield endpoint
        assert process.poll() is None, process.communicate()[1]


class Played:
    """A broker whose every word a test says itself."""

    def __init__(self, bind: str = "tcp://127.0.0.1:*", curve_secret: bytes | None = None) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.router_mandatory = True
        self.socket.router_handover = True
        if curve_secret is not None:
            self.socket.curve_secretkey = curve_secret
            self.socket.curve_server = True
        self.socket.bind(bind)
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def hear(self, patience_s: float = PATIENCE_S) -> list[bytes]:
        """Give the next message, identity first."""
        assert self.socket.poll(int(1000 * patience_s)), "nothing was said"
        return self.socket.recv_multipart()

    def hear_beside(self, *uninteresting: bytes) -> list[bytes]:
        """Give the next message that is not one of these commands of a worker."""
        while True:
            frames = self.hear()
            if frames[2] != b"MDPW01" or frames[3] not in uninteresting:
                return frames

    def is_silent(self, for_s: float = 0.3) -> bool:
        return not self.socket.poll(int(1000 * for_s))

    def say(self, *frames: bytes) -> None:
        self.socket.send_multipart(list(frames))

    def admit(self, lease: float = 60) -> bytes:
        """Wait for a peer that asks who we are, say that we are a broker of ours, and give its identity."""
        identity, *frames = self.hear()
        assert frames[:3] == [b"", b"MDPC01", b"mmi.notify"], frames
        wish = cbor2.loads(frames[3])
        assert (wish["v"], len(frames)) == (1, 4), frames
        self.say(identity, b"", b"MDPC01", b"mmi.notify", b"200", cbor2.dumps({"lease": lease}))
        return identity

    def request(self) -> tuple[bytes, bytes, list[bytes]]:
        """Give identity, correlation and the rest of the next request."""
        identity, correlation, empty, header, *rest = self.hear()
        assert (empty, header) == (b"", b"MDPC01"), (correlation, empty, header)
        return identity, correlation, rest

    def close(self) -> None:
        self.context.destroy(linger=0)


@contextmanager
def played(bind: str = "tcp://127.0.0.1:*", curve_secret: bytes | None = None) -> Iterator[Played]:
    broker = Played(bind, curve_secret)
    try:
        yield broker
    finally:
        broker.close()


def notice(**facts: Any) -> bytes:
    told = {"error": "WORKER_CRASHED", "service": "echo", "message": "died", "timestamp": "2026-01-01T00:00:00Z"}
    return cbor2.dumps({**told, **facts})
