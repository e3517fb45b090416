"""Crowds of workers come and go: whoever comes meanwhile is served at once."""

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import cbor2
import pytest
import zmq
from tests.mdp import broker as mdp_broker
from tests.mdp.broker import READY, Peers, broker_on, serve_afresh
from tests.mdp.fake_ledger import FakeLedger
from tests.mdp.fake_ledger import broker as core_broker
from tests.support.fleet import wait_for

from unstuck.config import Settings
from unstuck.ledger.contract.recovery import WorkerWatch
from unstuck.ledger.open import ready_ledger
from unstuck.mdp.broker import batch_runner, registrar
from unstuck.mdp.broker.backlog import LEAST_PORTION, MAX_WITHDRAWN, PORTION
from unstuck.mdp.broker.batch import Batch, BatchResult
from unstuck.mdp.broker.core import BrokerCore
from unstuck.recovery.reap import Reaper
from unstuck.worker.registration import new_worker_id

MAX_SOCKETS = 5_000
ALL_S = 180.0
"""How long hundreds may take to be registered or given up on a machine that is busy with other tests."""


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def broker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[mdp_broker.Broker]:
    with broker_on(request, tmp_path_factory.mktemp("broker"), request.param) as broker:
        yield broker


Dealers = list[zmq.Socket[bytes]]


@pytest.fixture
def crowd(peers: Peers) -> Iterator[Callable[[int], Dealers]]:
    """Open many connected sockets, which end with the test even if it fails: the next tests need the descriptors."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.max_sockets = MAX_SOCKETS
    opened: Dealers = []

    def open_all(count: int) -> Dealers:
        sockets = [context.socket(zmq.DEALER) for _ in range(count)]
        opened.extend(sockets)
        for socket in sockets:
            socket.connect(peers.broker.endpoint)
        return sockets

    yield open_all
    context.destroy(linger=0)


def test_workers_with_names_that_come_and_go_keep_nobody_waiting(peers: Peers, crowd: Callable[[int], Dealers]) -> None:
    """A name may stand in the ledger from before. So its end was written each time, after its beginning."""
    for _ in range(2_000):
        (gone,) = crowd(1)
        gone.linger = 1000
        about = cbor2.dumps({"name": secrets.token_hex(8)})
        gone.send_multipart([b"", b"MDPW01", READY, b"churn", b"", about])
        gone.close()
    for number in range(3):
        serve_afresh(peers, number)


def test_workers_that_come_and_die_all_at_once_keep_nobody_waiting(
    peers: Peers, crowd: Callable[[int], Dealers]
) -> None:
    """They stay for a while, so that all of them are registered; then a switch is turned off."""
    workers = crowd(700)
    for worker in workers:
        worker.send_multipart([b"", b"MDPW01", READY, peers.service])
    serve_afresh(peers, 0)
    client = peers.client()

    def registered() -> int:
        services = cbor2.loads(client.call(b"mmi.list", b"")[1])["services"]
        return sum(one["workers"] for one in services if one["service"] == peers.service.decode())

    wait_for(lambda: registered() == 700, "all of them to be registered", ALL_S)
    for worker in workers:
        worker.close(linger=0)
    for number in range(1, 4):
        serve_afresh(peers, number)
    wait_for(lambda: registered() == 0, "all of them to be gone", ALL_S)


def test_fifteen_hundred_that_come_at_once_keep_nobody_waiting(peers: Peers, crowd: Callable[[int], Dealers]) -> None:
    workers = crowd(1_500)
    for worker in workers:
        worker.send_multipart([b"", b"MDPW01", READY, peers.service])
    for number in range(3):
        serve_afresh(peers, number)


def test_whoever_comes_behind_a_crowd_is_not_the_last_to_be_registered() -> None:
    core = core_broker()
    for number in range(1_000):
        core.on_message(b"w%d" % number, [b"", b"MDPW01", READY, b"crowd"], number, 0.0)
    core.on_message(b"fresh", [b"", b"MDPW01", READY, b"other"], 5_000, 0.0)
    order = core.take_batch()
    assert order is not None
    assert len(order.registrations) == PORTION
    assert {birth.services for birth in order.registrations} == {("crowd",), ("other",)}


def test_slow_orders_register_fewer_workers_at_once() -> None:
    """A fresh worker waits for whole orders, so a slow ledger gets smaller ones."""
    core, ledger = core_broker(), FakeLedger()
    now_s = 0.0

    def take(took_s: float) -> Batch:
        nonlocal now_s
        order = core.take_batch(now_s)
        assert order is not None
        now_s += took_s
        core.on_batch_done(ledger.do(order), now_s)
        return order

    for number in range(1_500):
        core.on_message(b"w%d" % number, [b"", b"MDPW01", READY, b"crowd"], number, 0.0)
    births = [len(take(took_s).registrations) for took_s in [0.5] * 6 + [0.01] * 12]
    assert births[:6] == [PORTION, PORTION // 2, 4, LEAST_PORTION, LEAST_PORTION, LEAST_PORTION]
    assert births[-1] == PORTION
    for _ in range(6):
        take(0.5)
    core.on_message(b"fresh", [b"", b"MDPW01", READY, b"other"], 5_000, now_s)
    assert ("other",) in [birth.services for birth in take(0.5).registrations]


@pytest.mark.parametrize("dialect", ["sqlite", "postgres"])
def test_a_crowd_that_dies_is_looked_at_once_and_not_in_each_order(
    request: pytest.FixtureRequest, tmp_path: Path, dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = request.getfixturevalue("pg_server").new_ledger() if dialect == "postgres" else f"sqlite:///{tmp_path}/l.db"
    settings = Settings(url=url)
    monkeypatch.setattr(batch_runner, "WATCH_EVERY_S", 60.0)
    with closing(ready_ledger(settings)) as ledger:
        look, looks = ledger.recovery.watch, []

        def counted(*near: str | None) -> list[WorkerWatch]:
            looks.append(near)
            return look(*near)

        monkeypatch.setattr(ledger.recovery, "watch", counted)
        sitting = batch_runner.BatchRunner(ledger, settings, Reaper(ledger, settings.recovery, by="test"))
        core = BrokerCore(settings.mdp, new_worker_id, time.time)

        def settle() -> int:
            orders = 0
            while (order := core.take_batch()) is not None:
                answer = BatchResult()
                for step in sitting.steps(order, answer):
                    step.do()
                core.on_batch_done(answer, 0.0)
                orders += 1
            return orders

        for number in range(5 * PORTION):
            core.on_message(b"w%d" % number, [b"", b"MDPW01", READY, b"crowd"], number, 0.0)
        settle()
        assert len(ledger.workers.list(living_only=True)) == 5 * PORTION
        looks.clear()
        for number in range(5 * PORTION):
            core.on_connection_closed(number, 0.0)
        assert settle() >= 5
        assert ledger.workers.list(living_only=True) == []
        assert len(looks) == 1


@pytest.mark.parametrize("dialect", ["sqlite", "postgres"])
def test_workers_cannot_fill_the_ledger_with_services(
    request: pytest.FixtureRequest, tmp_path: Path, dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks are kept for good, and read by every broker: 90 messages made 81,000 of them."""
    url = request.getfixturevalue("pg_server").new_ledger() if dialect == "postgres" else f"sqlite:///{tmp_path}/l.db"
    settings = Settings(url=url)
    monkeypatch.setattr(registrar, "MAX_KNOWN_SERVICES", 100)
    with closing(ready_ledger(settings)) as ledger:
        sitting = batch_runner.BatchRunner(ledger, settings, Reaper(ledger, settings.recovery, by="test"))
        core = BrokerCore(settings.mdp, new_worker_id, time.time)

        def come(who: bytes, *said: bytes) -> list[bytes]:
            """Return what a worker hears that says READY."""
            core.on_message(who, [b"", b"MDPW01", READY, *said], None, 0.0)
            while (order := core.take_batch()) is not None:
                answer = BatchResult()
                for step in sitting.steps(order, answer):
                    step.do()
                core.on_batch_done(answer, 0.0)
            return [frame for to, frames in core.take_sends() if to == who for frame in frames]

        services = [[b"s-%d-%d" % (worker, number) for number in range(30)] for worker in range(4)]
        assert [come(b"w%d" % worker, *services[worker]) for worker in range(3)] == [[], [], []]
        assert come(b"old", *services[3]) == [b"", b"MDPW01", mdp_broker.DISCONNECT]
        *_, command, about = come(b"ours", *services[3], b"", cbor2.dumps({"name": "n"}))
        assert command == mdp_broker.DISCONNECT
        assert cbor2.loads(about)["error"] == "TOO_MANY_SERVICES"
        assert len(ledger.queues.tasks()) == 90
        assert come(b"again", *services[0]) == [], "known services are always served"
        assert len(ledger.workers.list(living_only=True)) == 4


def test_names_that_came_and_went_are_only_looked_up() -> None:
    core = core_broker()
    for number in range(2 * MAX_WITHDRAWN):
        about = cbor2.dumps({"name": f"name-{number}"})
        core.on_message(b"w%d" % number, [b"", b"MDPW01", READY, b"crowd", b"", about], number, 0.0)
        core.on_connection_closed(number, 0.0)
    order = core.take_batch()
    assert order is not None
    assert (order.registrations, order.deaths, len(order.withdrawn)) == ([], [], PORTION)
    assert core.outbox.backlog.withdrawn == MAX_WITHDRAWN - PORTION
