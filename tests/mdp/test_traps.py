"""What killed other brokers, or made them take the living for dead: each trap with raw frames and real signals."""

import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import cbor2
import psutil
import pytest
import zmq
from tests.mdp.broker import (
    DISCONNECT,
    HEARTBEAT,
    READY,
    WORKER_DIED,
    Broker,
    Peers,
    RawWorker,
    broker_on,
    line_of,
    running,
)
from tests.support.fleet import TIMEOUT_S, wait_for
from tests.support.signals import OwnProcess

from unstuck.config import MdpSettings, Settings
from unstuck.ledger.open import ready_ledger
from unstuck.maintenance.service import ScheduleWakeUps
from unstuck.mdp.broker import server
from unstuck.mdp.broker.handed_out import HandedOut
from unstuck.metrics.counters import Counters


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def broker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with broker_on(request, tmp_path_factory.mktemp("broker"), request.param) as broker:
        yield broker


@contextmanager
def plain_worker(peers: Peers, work_s: float = 0, gate: Path | None = None) -> "Iterator[subprocess.Popen[str]]":
    """Run a worker of one thread as a process: silent while it works, for so long and until the file is there."""
    words = ("worker", peers.broker.endpoint, peers.service.decode(), "--work", work_s, "--heartbeat", 0.3)
    with running("tests.mdp.plain_peers", *words, *(("--gate", gate) if gate else ())) as process:
        peers.broker.awaits(peers.service)
        yield process


def living(peers: Peers) -> int:
    """Return how many workers serve the peers' service."""
    code, told = peers.client().call(b"mmi.list", b"")
    assert code == b"200"
    services = cbor2.loads(told)["services"]
    return sum(one["workers"] for one in services if one["service"] == peers.service.decode())


# Deaths ----------------------------------------------------------------------------------------


def test_a_worker_that_is_silent_because_it_works_is_not_given_up(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    settings = {"heartbeat_interval": "300ms", "heartbeat_timeout": "600ms"}
    with broker_on(request, tmp_path, "sqlite", **settings) as broker:
        peers = Peers(broker)
        with plain_worker(peers, work_s=2) as process:
            client = peers.listener()
            client.ask(peers.service, b"long", correlation=b"tag")
            assert line_of(process.stdout).startswith("working")
            # Longer than an idle worker may be silent. Were it given up, the client would be told first.
            assert client.answer(peers.service, b"tag") == [b"long"]
        peers.close()


def test_a_killed_worker_is_seen_at_once_and_its_job_goes_to_the_next(peers: Peers) -> None:
    """By the end of its connection: a worker that is busy may be silent for minutes."""
    client = peers.listener(events=["WORKER_DIED"])
    with plain_worker(peers, work_s=600) as process:
        client.ask(peers.service, b"heavy")
        assert line_of(process.stdout).startswith("working")
        second = peers.worker()
        process.kill()
        client.notice(WORKER_DIED)
        address, body = second.request()
        assert body == [b"heavy"]
        second.reply(address, b"lifted")
        assert client.answer(peers.service) == [b"lifted"]
    assert client.is_silent()


def test_a_stopped_worker_is_seen_and_its_late_reply_is_refused(peers: Peers, tmp_path: Path) -> None:
    client = peers.client()
    gate = tmp_path / "gate"
    with plain_worker(peers, gate=gate) as process:
        client.ask(peers.service, b"job")
        assert line_of(process.stdout).startswith("working")
        second = peers.worker()
        process.send_signal(signal.SIGSTOP)
        address, body = second.request()
        assert body == [b"job"]
        assert living(peers) == 1
        gate.touch()
        process.send_signal(signal.SIGCONT)
        # It wakes, replies late, and comes back: in vain.
        wait_for(lambda: living(peers) == 2, "the one that was stopped to come back")
        second.reply(address, b"of the second")
        assert client.answer(peers.service) == [b"of the second"]
        assert client.is_silent(1)


def test_the_last_reply_of_a_worker_that_ends_right_after_it_counts(peers: Peers) -> None:
    """DISCONNECTED of the connection may overtake it."""
    client = peers.client()
    for number in range(25):
        worker = peers.worker()
        client.ask(peers.service, b"%d" % number)
        address, _ = worker.request()
        worker.reply(address, b"last words %d" % number)
        worker.close()
        assert client.answer(peers.service) == [b"last words %d" % number]
    assert client.is_silent()


def test_disconnect_from_a_busy_worker_gives_its_job_to_the_next(peers: Peers) -> None:
    client, worker = peers.client(), peers.worker()
    client.ask(peers.service, b"job")
    address, _ = worker.request()
    worker.tell(DISCONNECT)
    second = peers.worker()
    again, body = second.request()
    assert body == [b"job"]
    assert again != address, "another try, another token"
    worker.reply(address, b"late")
    worker.is_sent_away()
    assert client.is_silent()
    second.reply(again, b"done")
    assert client.answer(peers.service) == [b"done"]
    assert client.is_silent()


def test_a_worker_may_come_back_through_the_same_connection(peers: Peers) -> None:
    worker = peers.worker()
    for number in range(10):
        worker.tell(DISCONNECT)
        worker.tell(READY, peers.service)
        client = peers.client()
        client.ask(peers.service, b"%d" % number)
        address, body = worker.request()
        worker.reply(address, *body)
        assert client.answer(peers.service) == [b"%d" % number]


def test_who_leaves_while_a_job_is_looked_for_takes_none_along(peers: Peers) -> None:
    client = peers.client()
    for number in range(30):
        passer_by = RawWorker(peers.broker.endpoint, peers.service)
        client.ask(peers.service, b"%d" % number)
        passer_by.tell(DISCONNECT)
        passer_by.close()
    worker = peers.worker()
    seen = set()
    while len(seen) < 30:
        address, (body,) = worker.request()
        seen.add(body)
        worker.reply(address, body)
    assert sorted(client.answer(peers.service)[0] for _ in range(30)) == sorted(b"%d" % number for number in range(30))


def test_a_new_worker_on_the_number_of_an_old_connection_lives(peers: Peers) -> None:
    """File descriptors are used again at once."""
    for _ in range(20):
        short = RawWorker(peers.broker.endpoint, peers.service)
        peers.broker.awaits(peers.service)
        short.close(0)
        heir = peers.worker(peers.service + b"-heir")
        assert heir.is_idle(0.02)
        heir.tell(DISCONNECT)
        peers.broker.awaits(peers.service + b"-heir", served=False)


def test_a_killed_worker_is_seen_also_while_somebody_shouts(peers: Peers) -> None:
    client = peers.client()
    over = threading.Event()

    def shout() -> None:
        context = zmq.Context()
        shouter = context.socket(zmq.DEALER)
        shouter.connect(peers.broker.endpoint)
        while not over.is_set():
            try:
                shouter.send_multipart([b"", b"nonsense"], zmq.DONTWAIT)
            except zmq.Again:
                time.sleep(0.001)
        context.destroy(linger=0)

    shouters = [threading.Thread(target=shout) for _ in range(2)]
    with plain_worker(peers, work_s=60) as process:
        client.ask(peers.service, b"heavy")
        assert line_of(process.stdout).startswith("working")
        second = peers.worker()
        for shouter in shouters:
            shouter.start()
        try:
            process.kill()
            address, body = second.request()
            assert body == [b"heavy"]
        finally:
            over.set()
            for shouter in shouters:
                shouter.join()
        second.reply(address, b"lifted")
        assert client.answer(peers.service) == [b"lifted"]


# Identities ------------------------------------------------------------------------------------


def test_a_second_peer_with_the_same_identity_is_shut_out_while_the_first_lives(peers: Peers) -> None:
    """Handing the identity over would abort the broker: see `open_router`."""
    identity, client = secrets.token_bytes(16), peers.client()
    first = peers.worker(identity=identity)
    client.ask(peers.service, b"job")
    address, _ = first.request()
    process = OwnProcess(peers.broker.process.pid)

    def connections() -> int:
        return len([one for one in process.net_connections("tcp") if one.status == psutil.CONN_ESTABLISHED])

    before = connections()
    for _ in range(3):
        second = peers.stranger(identity)
        second.tell(READY, peers.service)
        second.tell(HEARTBEAT)
        assert second.is_idle(0.2)
        second.close(0)
    wait_for(lambda: connections() <= before, "the broker to be rid of the second")
    first.reply(address, b"of the first")
    assert client.answer(peers.service) == [b"of the first"]
    first.close(0)
    peers.broker.awaits(peers.service, served=False)
    heir = peers.worker(identity=identity)
    client.ask(peers.service, b"next")
    address, body = heir.request()
    heir.reply(address, *body)
    assert client.answer(peers.service) == [b"next"]


def test_a_peer_that_is_shut_out_may_say_much_and_go(peers: Peers) -> None:
    """A connection that libzmq holds for full, and that ends before its next heartbeat, would abort the broker."""
    identity, client = secrets.token_bytes(16), peers.client()
    first = peers.worker(identity=identity)
    second = peers.stranger(identity)
    for number in range(15_000):
        second.tell(HEARTBEAT)
        if number % 500 == 0:
            first.tell(HEARTBEAT)
    second.close(1_000)
    until_s = time.monotonic() + 2  # So long the heartbeats of the connection itself would go on.
    while time.monotonic() < until_s:
        first.tell(HEARTBEAT)
        time.sleep(0.1)
    assert peers.broker.process.poll() is None
    client.ask(peers.service, b"job")
    address, body = first.request()
    first.reply(address, *body)
    assert client.answer(peers.service) == [b"job"]


def test_nothing_is_sent_to_an_automatic_identity_of_before_a_restart(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with broker_on(request, tmp_path_factory.mktemp("again"), "sqlite") as broker:
        peers = Peers(broker)
        old = peers.client()
        old.ask(peers.service, b"from before")
        assert old.call(b"mmi.service", b"nobody") == [b"404"]
        old.close()
        broker.again()
        # Fresh sockets get their automatic identities from the broker: some may be the same as before.
        others = [peers.client() for _ in range(5)]
        for other in others:
            assert other.call(b"mmi.service", b"nobody") == [b"404"]
        worker = peers.worker()
        address, body = worker.request()
        assert body == [b"from before"], "the request itself is not lost"
        worker.reply(address, b"for somebody who is gone")
        assert all(other.is_silent(0.1) for other in others)
        peers.close()


@pytest.mark.parametrize("dialect", ["sqlite", "postgres"])
def test_a_worker_that_connects_in_the_moment_of_the_start_is_served(
    request: pytest.FixtureRequest, tmp_path: Path, dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peers come back as soon as the address is bound. A connection whose beginning was not seen was never heard."""
    url = request.getfixturevalue("pg_server").new_ledger() if dialect == "postgres" else f"sqlite:///{tmp_path}/l.db"
    create = HandedOut.create
    endpoint = f"ipc://{tmp_path}/broker"
    settings = Settings(url=url, mdp=MdpSettings(bind=endpoint))
    end = server._StopSignal()
    with closing(RawWorker(endpoint, b"echo")) as worker, closing(ready_ledger(settings)) as ledger:
        connected = worker.socket.get_monitor_socket(zmq.EVENT_CONNECTED)

        def create_later(folder: Path, digest: str, address: str = "") -> HandedOut:
            assert connected.poll(int(1000 * TIMEOUT_S)), "the worker connects as soon as the address is bound"
            return create(folder, digest, address)

        monkeypatch.setattr(HandedOut, "create", create_later)
        thread = threading.Thread(
            target=server._serve,
            args=(settings, ledger, Counters(), end, lambda address: None, None, ScheduleWakeUps()),
        )
        thread.start()
        try:
            assert worker.hear()[2] == HEARTBEAT
            assert len(ledger.workers.list(living_only=True)) == 1
        finally:
            wait_for(lambda: end.loop, "the loop")
            end.ask(0, None)
            thread.join(30)
        assert not thread.is_alive()


@pytest.mark.parametrize("dialect", ["sqlite", "postgres"])
def test_a_worker_that_beat_on_while_the_broker_was_away_is_sent_away_once(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, dialect: str
) -> None:
    """It answers each DISCONNECT with READY through the same connection. A second READY is a violation, so many at once
    went on for minutes."""
    with broker_on(request, tmp_path_factory.mktemp("again"), dialect) as broker:
        peers = Peers(broker)
        worker = peers.worker(identity=b"my own name")
        broker.process.kill()
        broker.process.wait(10)
        for _ in range(200):
            worker.tell(HEARTBEAT)
        broker.start()
        client = peers.client()
        client.ask(peers.service, b"job")
        sent_away = 0
        while (heard := worker.heard())[0] == DISCONNECT:
            sent_away += 1
            worker.tell(READY, peers.service)
        worker.reply(heard[1][0], b"done")
        assert client.answer(peers.service) == [b"done"]
        assert sent_away <= 3
        peers.close()


def test_a_reply_to_a_broker_of_before_counts_or_is_refused_by_its_token(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with broker_on(request, tmp_path_factory.mktemp("again"), "sqlite") as broker:
        peers = Peers(broker)
        client, worker = peers.client(), peers.worker()
        client.ask(peers.service, b"job")
        address, _ = worker.request()
        broker.again()
        worker.reply(address, b"of before")
        worker.is_sent_away()
        worker.reply(address, b"once more")
        worker.is_sent_away()
        _, told, *body = wait_for(
            lambda: (found := client.call(b"mmi.status", address.partition(b".")[0]))[0] == b"200" and found,
            "the job known",
        )
        assert cbor2.loads(told)["state"] == "succeeded"
        assert body == [b"of before"]
        peers.close()
