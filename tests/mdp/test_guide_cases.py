"""Unmodified peers of the guide in cases that once ended badly: expired requests, large replies, a killed broker."""

from collections.abc import Iterator
from pathlib import Path

import cbor2
import pytest
import zmq
from tests.mdp.broker import CLIENT, Broker, Peers, broker_on, settings_in_environment
from tests.mdp.guide_shapes import SHAPES, GuideClient, GuideWorker, Shape, jobs
from tests.support.fleet import wait_for

from unstuck.domain.states import JobState

MAX_BYTES = 100_000


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def broker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    settings = {"heartbeat_interval": "200ms", "max_message_bytes": MAX_BYTES}
    with broker_on(request, tmp_path_factory.mktemp("broker"), request.param, **settings) as broker:
        yield broker


@pytest.fixture(params=SHAPES, ids=lambda shape: shape.name)
def worker(request: pytest.FixtureRequest, peers: Peers) -> GuideWorker:
    worker = GuideWorker(peers, request.param)
    peers.broker.awaits(peers.service)
    return worker


@pytest.fixture(params=[zmq.REQ, zmq.DEALER], ids=["sync", "async"])
def client(request: pytest.FixtureRequest, peers: Peers) -> GuideClient:
    return GuideClient(peers, request.param)


@pytest.mark.parametrize("dialect", ["sqlite", "postgres"])
def test_a_listener_hears_the_last_word_about_an_expired_request_and_an_old_client_nothing(
    request: pytest.FixtureRequest, tmp_path: Path, dialect: str
) -> None:
    """The delay for crashes is long, and holds up no other notice."""
    settings = {"heartbeat_interval": "200ms", "request_ttl": "500ms", "crash_notification_delay_ms": 600_000}
    with broker_on(request, tmp_path, dialect, **settings) as broker:
        peers = Peers(broker)
        clients = [GuideClient(peers, kind) for kind in (zmq.REQ, zmq.DEALER)]
        listener = peers.listener()
        for client in clients:
            client.send(b"old")
        listener.ask(peers.service, b"new", correlation=b"c")
        [told] = listener.notice(b"\x09", b"c")
        assert "final" not in told
        [told] = listener.notice(b"\x09", b"c")
        assert told["final"] is True
        assert listener.is_silent()
        wait_for(lambda: [job.state for job in jobs(peers)] == [JobState.CANCELLED] * 3, "all of them to expire")
        assert all(client.is_silent() for client in clients), "an old client was told something"
        peers.close()


def test_a_reply_that_is_too_large_fails_its_job_and_the_worker_goes_on(
    worker: GuideWorker, client: GuideClient, peers: Peers
) -> None:
    client.send(b"job")
    worker.recv()
    worker.reply(b"x" * (2 * MAX_BYTES))
    assert cbor2.loads(client.recv()[0])["error"] == "RESULT_NOT_STORABLE"
    client.send(b"next")
    assert worker.recv() == [b"next"]
    worker.reply(b"done")
    assert client.recv() == [b"done"]
    assert sorted(job.state for job in jobs(peers)) == [JobState.FAILED, JobState.SUCCEEDED]


def test_a_request_that_is_too_large_is_dropped_and_the_next_one_is_served(worker: GuideWorker, peers: Peers) -> None:
    client = GuideClient(peers, zmq.DEALER)
    client.send(b"x" * (2 * MAX_BYTES))
    client.send(b"next")
    assert worker.recv() == [b"next"]
    worker.reply(b"done")
    assert client.recv() == [b"done"]
    assert len(jobs(peers)) == 1
    assert "too many frames or bytes" in peers.broker.log.read_text()


def test_frames_that_are_all_maps_are_calls_with_one_reply(worker: GuideWorker, client: GuideClient) -> None:
    options, first, second = ({"priority": 5}, {"JobID": "a", "n": 1}, {"JobID": "b", "n": 2})
    client.send(*map(cbor2.dumps, (options, first, second)))
    for _ in range(2):
        said, called = map(cbor2.loads, worker.recv())
        assert said == options
        worker.reply(cbor2.dumps({"did": called["n"]}))
    assert [cbor2.loads(one) for one in client.recv()] == [{"did": 1}, {"did": 2}]


def test_a_mixture_of_maps_and_bytes_is_one_body(worker: GuideWorker, client: GuideClient, peers: Peers) -> None:
    body = [cbor2.dumps({"a": 1}), b"bytes", cbor2.dumps({"b": 2})]
    client.send(*body)
    assert worker.recv() == body
    worker.reply(b"done")
    assert client.recv() == [b"done"]
    assert len(jobs(peers)) == 1


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("dialect", ["sqlite", "postgres"])
def test_what_a_killed_broker_held_for_an_old_worker_is_done_long_before_the_busy_timeout(
    request: pytest.FixtureRequest, tmp_path: Path, dialect: str, shape: Shape
) -> None:
    """Of many requests of an asynchronous client some were claimed in advance, and one was at work."""
    with broker_on(request, tmp_path, dialect, heartbeat_interval="200ms") as broker:
        peers = Peers(broker)
        worker = GuideWorker(peers, shape)
        broker.awaits(peers.service)
        client = GuideClient(peers, zmq.DEALER)
        for number in range(60):
            client.send(b"%d" % number)
        for _ in range(20):
            worker.recv()
            worker.reply(b"done")
        worker.recv()
        # The next one gives up soon what is silent and idle. What is busy has ten minutes, and nobody waits so long.
        broker.settings |= settings_in_environment({"heartbeat_interval": "200ms", "heartbeat_timeout": "1s"})
        broker.again()
        worker.close(0)
        other = GuideWorker(peers, shape)

        def all_done() -> bool:
            while not other.is_silent(0.05):
                # Nothing may come behind a heartbeat: the last reply is on its way to the ledger.
                if other.take() is not None:
                    other.reply(b"done")
            return {job.state for job in jobs(peers)} == {JobState.SUCCEEDED}

        wait_for(all_done, "all to be done")
        assert len(jobs(peers)) == 60
        peers.close()


def test_a_wish_for_unknown_events_is_refused(peers: Peers) -> None:
    client = peers.client(b"i" * 16)
    assert client.listen(events=["WORKER_DIED", "NO_SUCH_EVENT"])[0] == b"501"
    client.say(b"", CLIENT, b"mmi.notify", b"\xff")
    assert client.answer(b"mmi.notify")[0] == b"501"
