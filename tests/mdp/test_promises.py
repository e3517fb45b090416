"""Every request that is taken is answered once, or ends with one last notice."""

from collections.abc import Iterator
from pathlib import Path

import cbor2
import psycopg
import pytest
from tests.mdp.broker import WORKER_DIED, Broker, BrokerHarness, Peers, RawWorker, broker_on, clear_away
from tests.support.fleet import TIMEOUT_S

from unstuck.config import Recovery, Settings
from unstuck.mdp.broker.batch import Batch, BatchResult
from unstuck.mdp.broker.batch_runner import BatchRunner
from unstuck.recovery.reap import Reaper

SETTINGS = {"retry_attempts": 0, "heartbeat_interval": "200ms"}


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def broker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with broker_on(request, tmp_path_factory.mktemp("broker"), request.param, **SETTINGS) as broker:
        yield broker


def lose(worker: RawWorker) -> None:
    """Take the next request, and die."""
    worker.request()
    worker.close(0)


@pytest.mark.parametrize("events", [[], ["NO_WORKERS"]])
def test_a_client_that_wants_no_news_of_deaths_is_answered_when_its_job_is_lost(
    peers: Peers, events: list[str]
) -> None:
    client, worker = peers.listener(events=events), peers.worker()
    client.ask(peers.service, b"job", correlation=b"tag")
    lose(worker)
    (said,) = client.answer(peers.service, b"tag")
    assert cbor2.loads(said)["error"] == "WORKER_CRASHED"
    assert client.is_silent()


def test_a_last_word_that_could_not_be_said_is_said_when_the_client_asks_again(peers: Peers) -> None:
    client, worker = peers.listener(ttl=1), peers.worker()
    client.ask(peers.service, b"job", correlation=b"tag")
    worker.request()
    # Its lease runs out, as that of a process that was stopped for a while.
    assert client.is_silent(2.0)
    worker.close(0)
    peers.broker.awaits(peers.service, served=False)
    assert client.is_silent()
    client.ask(b"mmi.notify", cbor2.dumps({"v": 1}))
    heard = [client.hear(), client.hear()]
    assert sorted(frames[-2] for frames in heard) == [WORKER_DIED, b"200"]
    assert client.is_silent()


def test_the_end_of_one_call_of_several_is_told_once_however_often_the_wish_is_renewed(peers: Peers) -> None:
    client, first, second = peers.listener(), peers.worker(), peers.worker()
    client.ask(peers.service, cbor2.dumps({}), cbor2.dumps({"a": 1}), cbor2.dumps({"b": 2}), correlation=b"tag")
    address, _ = first.request()
    lose(second)
    assert [told["final"] for told in client.notice(WORKER_DIED, b"tag")] == [True]
    for _ in range(3):
        client.ask(b"mmi.notify", cbor2.dumps({"v": 1}))
        assert client.answer(b"mmi.notify")[0] == b"200"
        assert client.is_silent()
    first.reply(address, b"done")
    assert len(client.answer(peers.service, b"tag")) == 2
    assert client.is_silent()


@pytest.mark.parametrize("dialect", ["sqlite", "postgres"])
def test_a_request_that_was_taken_in_time_is_tried_again_however_late_its_worker_dies(
    request: pytest.FixtureRequest, tmp_path: Path, dialect: str
) -> None:
    settings = {"request_ttl": "700ms", "heartbeat_interval": "100ms", "retry_attempts": 3}
    with broker_on(request, tmp_path, dialect, **settings) as broker:
        peers = Peers(broker)
        client, worker = peers.listener(), peers.worker()
        client.ask(peers.service, b"job", correlation=b"tag")
        worker.request()
        assert client.is_silent(1.5), "longer than it might have waited for a worker"
        worker.close(0)
        assert "final" not in client.notice(WORKER_DIED, b"tag")[0]
        second = peers.worker()
        address, body = second.request()
        second.reply(address, *body)
        assert client.answer(peers.service, b"tag") == [b"job"]
        peers.close()


def test_a_job_that_a_python_worker_has_begun_does_not_expire(scene: BrokerHarness) -> None:
    """The broker looks from time to time who has what it was asked for, and may have looked before."""
    worker = scene.fleet.start("--concurrency", "1")
    gate = scene.folder / "gate"
    job, _ = scene.fleet.begin("wait_for_file", str(gate))
    ledger = scene.fleet.ledger
    desk = BatchRunner(ledger, Settings(url=scene.fleet.url), Reaper(ledger, Recovery(), by="test"))
    answer = BatchResult()
    for step in desk.steps(Batch(overdue=[job.id]), answer):
        step.do()
    assert answer.expired == []
    assert [held.cancel_requested for held in ledger.workers.held(worker.id)] == [False]
    gate.touch()
    assert job.result(TIMEOUT_S) == "rested"


def test_a_reply_is_sent_once_though_a_lock_keeps_the_ledger_from_noting_it(ready_pg_url: str, tmp_path: Path) -> None:
    broker = Broker(ready_pg_url, tmp_path / "log")
    peers = Peers(broker)
    try:
        client, worker, other = peers.listener(), peers.worker(), peers.client()
        client.ask(peers.service, b"job", correlation=b"tag")
        address, body = worker.request()
        with psycopg.connect(ready_pg_url) as user:
            assert user.execute("select job_id from unstuck.reply_addresses for update").fetchall()
            worker.reply(address, *body)
            assert client.answer(peers.service, b"tag") == [b"job"]
            for _ in range(3):
                client.ask(b"mmi.notify", cbor2.dumps({"v": 1}))
                assert client.answer(b"mmi.notify")[0] == b"200"
                # Behind this answer the letters of the client were read.
                assert other.call(b"mmi.health", b"")[0] == b"200"
            assert client.is_silent(), "a reply came twice"
        assert client.is_silent()
    finally:
        peers.close()
        broker.process.kill()
        broker.process.wait(10)
        clear_away(broker.url)
