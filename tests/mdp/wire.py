"""A broker of ours as a process, and peers that are nothing but a socket: every frame is a test's own.

The peers know the specification alone: 7/MDP 0.1, and what `docs/zeromq.md` says about notices.
"""

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cbor2
import pytest
import zmq
from tests import forked
from tests.fleet import PATIENCE_S, ROOT, wait_for

from unstuck.mdp.broker.handed import digest_of, find_abandoned
from unstuck.runner.trace import trace_folder

CLIENT, WORKER = b"MDPC01", b"MDPW01"
READY, REQUEST, REPLY, HEARTBEAT, DISCONNECT = b"\x01", b"\x02", b"\x03", b"\x04", b"\x05"
WORKER_DIED, NO_WORKERS = b"\x08", b"\x09"
QUIET_S = 0.3
"""So long nothing must come where nothing may come."""
SERVED_S = 4.0
"""How soon a fresh worker is served on a machine of two cores that others use too."""


class Raw:
    """A DEALER socket, and what is said through it."""

    def __init__(self, endpoint: str, identity: bytes | None = None, **options: int) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 2000
        if identity is not None:
            self.socket.identity = identity
        for name, value in options.items():
            setattr(self.socket, name, value)
        self.socket.connect(endpoint)

    def say(self, *frames: bytes) -> None:
        self.socket.send_multipart(list(frames))

    def hear(self, patience_s: float = PATIENCE_S) -> list[bytes]:
        assert self.socket.poll(int(1000 * patience_s)), "nothing was said"
        return self.socket.recv_multipart()

    def is_silent(self, for_s: float = QUIET_S) -> bool:
        return not self.socket.poll(int(1000 * for_s))

    def close(self, linger_ms: int = 2000) -> None:
        self.context.destroy(linger=linger_ms)


class RawClient(Raw):
    def ask(self, service: bytes, *body: bytes, correlation: bytes | None = None) -> None:
        self.say(*([] if correlation is None else [correlation]), b"", CLIENT, service, *body)

    def answer(self, service: bytes, correlation: bytes | None = None, patience_s: float = PATIENCE_S) -> list[bytes]:
        """Give the body of the reply that comes next."""
        before = [] if correlation is None else [correlation]
        heard = self.hear(patience_s)
        assert heard[: len(before) + 3] == [*before, b"", CLIENT, service], heard
        return heard[len(before) + 3 :]

    def call(self, service: bytes, *body: bytes, correlation: bytes | None = None) -> list[bytes]:
        self.ask(service, *body, correlation=correlation)
        return self.answer(service, correlation)

    def listen(self, **wish: Any) -> list[bytes]:
        """Ask to be told of deaths."""
        return self.call(b"mmi.notify", cbor2.dumps({"v": 1, **wish}))

    def notice(self, command: bytes, correlation: bytes | None = None) -> list[dict[str, Any]]:
        """Give the maps of the notice that comes next."""
        before = [] if correlation is None else [correlation]
        heard = self.hear()
        assert heard[: len(before) + 3] == [*before, b"", CLIENT, command], heard
        return [cbor2.loads(one) for one in heard[len(before) + 3 :]]


class RawWorker(Raw):
    def __init__(self, endpoint: str, *services: bytes, identity: bytes | None = None) -> None:
        super().__init__(endpoint, identity)
        self.services = services
        if services:
            self.tell(READY, *services)

    def tell(self, command: bytes, *rest: bytes) -> None:
        self.say(b"", WORKER, command, *rest)

    def heard(self, *uninteresting: bytes, patience_s: float = PATIENCE_S) -> tuple[bytes, list[bytes]]:
        """Give the next command that is no beat, with what follows it."""
        until_s = time.monotonic() + patience_s
        while True:
            empty, header, command, *rest = self.hear(until_s - time.monotonic())
            assert (empty, header) == (b"", WORKER), (empty, header)
            if command not in (HEARTBEAT, *uninteresting):
                return command, rest
            self.tell(HEARTBEAT)

    def request(self) -> tuple[bytes, list[bytes]]:
        """Give the address and the body of the request that comes next."""
        command, rest = self.heard()
        assert command == REQUEST, (command, rest)
        address, empty, *body = rest
        assert empty == b"", rest
        assert address, rest
        assert body, rest
        return address, body

    def reply(self, address: bytes, *body: bytes) -> None:
        self.tell(REPLY, address, b"", *body)

    def is_sent_away(self) -> None:
        command, rest = self.heard()
        assert (command, rest) == (DISCONNECT, [])

    def is_idle(self, for_s: float = QUIET_S) -> bool:
        """Say whether nothing but beats comes."""
        until_s = time.monotonic() + for_s
        while (left_s := until_s - time.monotonic()) > 0:
            if not self.is_silent(left_s) and self.hear()[2] != HEARTBEAT:
                return False
        return True


class Broker:
    """`unstuck broker`, running."""

    def __init__(self, url: str, log: Path, **settings: object) -> None:
        self.url = url
        self.log = log
        self.settings = {f"UNSTUCK_MDP_{name.upper()}": str(value) for name, value in settings.items()}
        self.bind = "tcp://127.0.0.1:0"
        self.peers: list[Peers] = []
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = forked.start(
                "unstuck.cli.main",
                "broker",
                "--bind",
                self.bind,
                cwd=ROOT,
                env={**os.environ, "UNSTUCK_URL": self.url, **self.settings},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self.process.stdout is not None
        with self.process.stdout as said:
            line = said.readline()
        assert line.startswith("Serving "), (line, self.log.read_text())
        self.endpoint = self.bind = line.split()[1]

    def again(self) -> None:
        """kill -9, and start anew on the same port."""
        self.process.kill()
        self.process.wait(10)
        self.start()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)

    def is_well(self) -> None:
        """See that it lives, and serves somebody whom it does not know."""
        assert self.process.poll() is None, self.log.read_text()[-4000:]
        service = b"well-" + secrets.token_hex(4).encode()
        worker, client = RawWorker(self.endpoint, service), RawClient(self.endpoint)
        try:
            client.ask(service, b"are you well?")
            address, body = worker.request()
            worker.reply(address, *body)
            assert client.answer(service) == [b"are you well?"]
        finally:
            worker.tell(DISCONNECT)
            worker.close()
            client.close()

    def serves(self, service: bytes, client: RawClient) -> bool:
        return client.call(b"mmi.service", service) == [b"200"]

    def awaits(self, service: bytes, served: bool = True) -> None:
        """Wait until somebody serves this, or nobody does."""
        client = RawClient(self.endpoint)
        wait_for(lambda: self.serves(service, client) is served, f"{service!r} served: {served}", every_s=0.02)
        client.close()


def clear_away(url: str) -> None:
    """Remove what brokers of this ledger that were killed left for the next one."""
    for one in find_abandoned(trace_folder(), digest_of(url)):
        one.estate.close()


@contextmanager
def broker_on(request: pytest.FixtureRequest, folder: Path, dialect: str, **settings: object) -> Iterator[Broker]:
    """Run a broker on a fresh ledger of this dialect, and see in the end that nothing broke it."""
    url = f"sqlite:///{folder / 'ledger.db'}"
    server = None
    if dialect == "postgres":
        server = request.getfixturevalue("pg_server")
        url = server.new_ledger()
    broker = Broker(url, folder / "broker.log", **settings)
    try:
        yield broker
        broker.is_well()
        assert broker.stop() == 0, broker.log.read_text()[-4000:]
        assert "Traceback" not in broker.log.read_text()
    finally:
        for peers in broker.peers:
            peers.close()
        broker.process.kill()
        broker.process.wait(10)
        clear_away(url)
        if server is not None:
            server.drop_database(url)


class Peers:
    """Makes peers of one broker, with services and identities of their own, and closes them."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.service = b"s-" + secrets.token_hex(5).encode()
        self.made: list[Raw] = []
        broker.peers.append(self)

    def client(self, identity: bytes | None = None, **options: int) -> RawClient:
        return self._keep(RawClient(self.broker.endpoint, identity, **options))

    def listener(self, **wish: Any) -> RawClient:
        """Give a client that asked to be told."""
        client = self.client(secrets.token_bytes(16))
        code, lease = client.listen(**wish)
        assert code == b"200"
        assert cbor2.loads(lease)["lease"] > 0
        return client

    def worker(self, *services: bytes, identity: bytes | None = None) -> RawWorker:
        """Give a worker that the broker knows."""
        worker = self._keep(RawWorker(self.broker.endpoint, *(services or (self.service,)), identity=identity))
        self.broker.awaits(worker.services[0])
        return worker

    def stranger(self, identity: bytes | None = None) -> RawWorker:
        """Give a worker that has said nothing yet."""
        return self._keep(RawWorker(self.broker.endpoint, identity=identity))

    def _keep(self, peer: Any) -> Any:
        self.made.append(peer)
        return peer

    def close(self) -> None:
        for peer in self.made:
            if isinstance(peer, RawWorker) and not peer.socket.closed:
                peer.tell(DISCONNECT)
            peer.close(500)
        self.made.clear()


def serve_afresh(peers: Peers, number: int) -> float:
    """Let a worker and a client come that the broker does not know; return how long it took until they were served."""
    begun_s = time.monotonic()
    service = peers.service + b"-%d" % number
    worker, client = RawWorker(peers.broker.endpoint, service), peers.client()
    client.ask(service, b"fresh")
    address, body = worker.request()
    worker.reply(address, *body)
    assert client.answer(service) == [b"fresh"]
    worker.tell(DISCONNECT)
    worker.close()
    return time.monotonic() - begun_s
