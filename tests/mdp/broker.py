"""A broker of ours as a process on a ledger, workers beside it, and what they wrote down."""

import os
import queue
import secrets
import signal
import subprocess
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import cbor2
import pytest
import zmq
from tests.support import processes
from tests.support.fleet import ROOT, TIMEOUT_S, Fleet, wait_for
from tests.support.postgres import reserve_port

from unstuck.config import Recovery
from unstuck.domain.liveness import Detector
from unstuck.domain.states import JobState
from unstuck.ledger.contract.jobs import JobFilter, JobRecord
from unstuck.ledger.contract.workers import WorkerRecord
from unstuck.mdp import Client
from unstuck.mdp.broker.handed_out import digest_of, find_abandoned
from unstuck.recovery.reap import Reaper
from unstuck.runner.status_page import status_page_folder

Process = subprocess.Popen[bytes]

PATIENT = {"heartbeat_timeout": "10m", "busy_timeout": "10m"}
"""Peers of tests are not heard while their test does something else, for longer on a busy machine. So a broker gives
none of them up for its silence, unless the test is about that."""


ANY_PORT = "tcp://127.0.0.1:0"


class ReservedEndpoint(str):
    """An address on this machine. While this object is there, the kernel gives its port to no one else, even between
    two brokers; and no peer that looks for a broker there connects to itself."""

    @classmethod
    def new(cls) -> "ReservedEndpoint":
        reserved = reserve_port()
        endpoint = cls(f"tcp://127.0.0.1:{reserved.getsockname()[1]}")
        weakref.finalize(endpoint, os.close, reserved.detach())
        return endpoint


@dataclass(frozen=True)
class Work:
    """One execution, as the worker wrote it down; without an end it was cut off."""

    name: str
    pid: int
    began: int
    ended: int | None


class BrokerHarness:
    """Starts whatever a test asks for; all of it ends with the test."""

    def __init__(self, url: str, folder: Path) -> None:
        self.folder = folder
        self.notes = folder / "notes"
        self.fleet = Fleet(url, folder)
        self.endpoint: str = ANY_PORT
        self._processes: list[Process] = []
        self._clients: list[RecordingClient] = []
        self.open()

    def open(self, **settings: object) -> None:
        """Start a broker; a second one comes where the first one was."""
        if self.endpoint == ANY_PORT:
            self.endpoint = ReservedEndpoint.new()
        self.log = self.folder / f"broker-{len(self._processes)}.log"
        self._settings = settings_in_environment(settings)
        with self.log.open("wb") as file:
            self.broker = self._start(
                "unstuck.cli.main", "broker", "--bind", self.endpoint, stdout=subprocess.PIPE, stderr=file
            )
        assert self.broker.stdout is not None
        said = self.broker.stdout.readline().decode().split()
        assert said[:2] == ["Serving", self.endpoint], (said, self.log.read_text())

    def kill_broker(self) -> None:
        self.broker.kill()
        self.broker.wait()

    def worker(self, service: str = "echo", *more: str, ready: bool = True) -> Process:
        before = len(self.living(service))
        process = self._start("tests.mdp.recording_worker", self.endpoint, service, str(self.notes), *more)
        if ready:
            wait_for(lambda: len(self.living(service)) > before, f"a worker for {service}")
        return process

    def plain_client(self, service: str, *body: str, timeout_s: float = TIMEOUT_S) -> "subprocess.Popen[bytes]":
        return self._start(
            "tests.mdp.plain_peers", "client", self.endpoint, service, *body, "--timeout", str(timeout_s), "--dealer",
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def client(self, **settings: Any) -> "RecordingClient":
        client = RecordingClient(self.endpoint, timeout=TIMEOUT_S, log_errors=False, **settings)
        self._clients.append(client)
        return client

    def living(self, service: str) -> list[WorkerRecord]:
        return [worker for worker in self.fleet.ledger.workers.list(living_only=True) if service in worker.tasks]

    def declare_dead(self, worker: WorkerRecord) -> None:
        Reaper(self.fleet.ledger, Recovery(), by="test").report_death(worker.id, Detector.OPERATOR, "somebody says so")

    def done(self) -> list[Work]:
        """Give what was done or begun, in the order of the beginnings."""
        begun: dict[tuple[str, int], int] = {}
        found: list[Work] = []
        for line in self.notes.read_text().splitlines() if self.notes.exists() else ():
            word, name, pid, at = line.split()
            if word == "begin":
                begun[name, int(pid)] = int(at)
            else:
                found.append(Work(name, int(pid), begun.pop((name, int(pid))), int(at)))
        found += [Work(name, pid, at, None) for (name, pid), at in begun.items()]
        return sorted(found, key=lambda work: work.began)

    def times(self) -> Counter[str]:
        return Counter(work.name for work in self.done())

    def wait_begun(self, name: str, times: int = 1) -> Work:
        """Wait until somebody is in the middle of it; give that execution."""
        wait_for(lambda: self.times()[name] >= times, f"{name} to begin the {times}. time")
        return [work for work in self.done() if work.name == name][-1]

    def jobs(self, *states: JobState) -> list[JobRecord]:
        return self.fleet.ledger.jobs.list(JobFilter(states=states, limit=5000))

    def job(self) -> JobRecord:
        """Give the only job that there is."""
        (found,) = self.jobs()
        record = self.fleet.ledger.jobs.get(found.id)
        assert record is not None
        return record

    def close(self) -> None:
        for client in self._clients:
            client.close()
        for process in reversed(self._processes):
            process.kill()
            process.communicate()
        clear_away(self.fleet.url)
        self.fleet.close()

    def _start(self, module: str, *words: str, **more: Any) -> Process:
        process: Process = processes.start(
            module,
            *words,
            cwd=ROOT,
            env={**self.fleet.surroundings(), **self._settings},
            stdin=subprocess.DEVNULL,
            **more,
        )
        self._processes.append(process)
        return process


def settings_in_environment(settings: Mapping[str, object]) -> dict[str, str]:
    return {f"UNSTUCK_MDP_{name.upper()}": str(value) for name, value in {**PATIENT, **settings}.items()}


class RecordingClient(Client):
    """A client that keeps what it is told."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        self.news: queue.Queue[dict[str, Any]] = queue.Queue()
        super().__init__(*arguments, **settings)

    def handle_error_notification(self, error: dict[str, Any]) -> None:
        self.news.put(error)

    def next(self) -> dict[str, Any]:
        return self.news.get(timeout=TIMEOUT_S)


def as_cbor(**values: Any) -> bytes:
    return cbor2.dumps(values)


CLIENT, WORKER = b"MDPC01", b"MDPW01"
READY, REQUEST, REPLY, HEARTBEAT, DISCONNECT = b"\x01", b"\x02", b"\x03", b"\x04", b"\x05"
WORKER_DIED, NO_WORKERS = b"\x08", b"\x09"
QUIET_S = 0.3
"""So long nothing must come where nothing may come."""


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

    def hear(self, patience_s: float = TIMEOUT_S) -> list[bytes]:
        assert self.socket.poll(int(1000 * patience_s)), "nothing was said"
        return self.socket.recv_multipart()

    def is_silent(self, for_s: float = QUIET_S) -> bool:
        return not self.socket.poll(int(1000 * for_s))

    def close(self, linger_ms: int = 2000) -> None:
        self.context.destroy(linger=linger_ms)


class RawClient(Raw):
    def ask(self, service: bytes, *body: bytes, correlation: bytes | None = None) -> None:
        self.say(*([] if correlation is None else [correlation]), b"", CLIENT, service, *body)

    def answer(self, service: bytes, correlation: bytes | None = None, patience_s: float = TIMEOUT_S) -> list[bytes]:
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

    def heard(self, *uninteresting: bytes, patience_s: float = TIMEOUT_S) -> tuple[bytes, list[bytes]]:
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
        self.settings = settings_in_environment(settings)
        self.bind: str = ReservedEndpoint.new()
        self.peers: list[Peers] = []
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = processes.start(
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
        self.endpoint = line.split()[1]

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
    for one in find_abandoned(status_page_folder(), digest_of(url)):
        one.record.close()


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


def serve_afresh(peers: Peers, number: int) -> None:
    """Connect a new worker and a new client, and check that they are served."""
    service = peers.service + b"-%d" % number
    worker, client = RawWorker(peers.broker.endpoint, service), peers.client()
    client.ask(service, b"fresh")
    address, body = worker.request()
    worker.reply(address, *body)
    assert client.answer(service) == [b"fresh"]
    worker.tell(DISCONNECT)
    worker.close()


@contextmanager
def running(*words: object) -> "Iterator[subprocess.Popen[str]]":
    """Run a module of ours as a process, and end it."""
    process = processes.start(*map(str, words), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
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
    with running("tests.mdp.reference_broker", "--bind", bind, "--heartbeat", heartbeat_s) as process:
        endpoint = line_of(process.stdout)
        assert endpoint, process.communicate()
        yield endpoint
        assert process.poll() is None, process.communicate()[1]


class Played:
    """A broker whose every word a test says itself."""

    def __init__(self, endpoint: str | None = None, curve_secret: bytes | None = None) -> None:
        self.endpoint = ReservedEndpoint.new() if endpoint is None else endpoint
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.router_mandatory = True
        self.socket.router_handover = True
        if curve_secret is not None:
            self.socket.curve_secretkey = curve_secret
            self.socket.curve_server = True
        self.socket.bind(self.endpoint)

    def hear(self, patience_s: float = TIMEOUT_S) -> list[bytes]:
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
def played(endpoint: str | None = None, curve_secret: bytes | None = None) -> Iterator[Played]:
    broker = Played(endpoint, curve_secret)
    try:
        yield broker
    finally:
        broker.close()


def notice(**facts: Any) -> bytes:
    told = {"error": "WORKER_CRASHED", "service": "echo", "message": "died", "timestamp": "2026-01-01T00:00:00Z"}
    return cbor2.dumps({**told, **facts})
