"""Unmodified Majordomo peers of the guide, frame by frame as their languages send them, in all cases.

The frames of each shape are those of `mdwrkapi` and `mdcliapi` in that language. Their assertions are kept: a message
that one of them does not expect ends its test.
"""

from collections.abc import Callable, Iterator

import cbor2
import pytest
import zmq
from tests.mdp.broker import CLIENT, DISCONNECT, HEARTBEAT, READY, REPLY, Broker, Peers, broker_on
from tests.mdp.guide_shapes import SHAPES, GuideClient, GuideWorker, Shape, jobs
from tests.support.fleet import wait_for

from unstuck.config import Settings
from unstuck.domain.states import JobState, WorkerState
from unstuck.ledger.open import ready_ledger


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def broker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with broker_on(request, tmp_path_factory.mktemp("broker"), request.param, heartbeat_interval="200ms") as broker:
        yield broker


@pytest.fixture(params=SHAPES, ids=lambda shape: shape.name)
def worker(request: pytest.FixtureRequest, peers: Peers) -> GuideWorker:
    worker = GuideWorker(peers, request.param)
    peers.broker.awaits(peers.service)
    return worker


@pytest.fixture(params=[zmq.REQ, zmq.DEALER], ids=["sync", "async"])
def client(request: pytest.FixtureRequest, peers: Peers) -> GuideClient:
    return GuideClient(peers, request.param)


@pytest.mark.parametrize(
    "body", [[b"one"], [b"two", b"frames"], [b"x", b"", b"y"], [b"\x00\xff" * 1000], [b"03", b"05"]]
)
def test_a_request_is_answered(worker: GuideWorker, client: GuideClient, body: list[bytes]) -> None:
    client.send(*body)
    assert worker.recv() == body
    worker.reply(*body)
    assert client.recv() == body
    # It goes on as the same worker: it was not sent away.
    client.send(b"again")
    assert worker.recv() == [b"again"]
    worker.reply(b"well")
    assert client.recv() == [b"well"]


def test_an_empty_reply_is_a_reply(worker: GuideWorker, client: GuideClient, peers: Peers) -> None:
    client.send(b"anything")
    worker.recv()
    worker.reply(*([b""] if worker.shape.name != "c" else []))
    assert client.recv() == [b""]
    assert [job.state for job in jobs(peers)] == [JobState.SUCCEEDED]


def test_many_requests_of_one_client_are_answered_in_turn(worker: GuideWorker, peers: Peers) -> None:
    client = GuideClient(peers, zmq.DEALER)
    for number in range(20):
        client.send(b"%d" % number)
    for number in range(20):
        assert worker.recv() == [b"%d" % number]
        worker.reply(b"done %d" % number)
    assert sorted(client.recv() for _ in range(20)) == sorted([b"done %d" % number] for number in range(20))


def test_a_worker_that_dies_at_work_is_replaced(worker: GuideWorker, client: GuideClient, peers: Peers) -> None:
    client.send(b"precious")
    worker.recv()
    worker.close(0)
    other = GuideWorker(peers, worker.shape)
    assert other.recv() == [b"precious"]
    other.reply(b"done")
    assert client.recv() == [b"done"]
    assert [(job.state, job.crash_count) for job in jobs(peers)] == [(JobState.SUCCEEDED, 1)]


def test_mmi_service_knows_it(worker: GuideWorker, peers: Peers) -> None:
    client = peers.client()
    assert client.call(b"mmi.service", worker.service) == [b"200"]
    assert client.call(b"mmi.service", b"no-such") == [b"404"]
    assert client.call(b"mmi.nonsense", b"x") == [b"501"]


def violate_with(*frames: bytes) -> Callable[[GuideWorker], None]:
    return lambda worker: worker.say(*frames)


VIOLATIONS: dict[str, Callable[[GuideWorker], None]] = {
    "a second READY": lambda worker: worker.send(READY, [worker.service]),
    "no command": violate_with(b"", b"MDPW01"),
    "an unknown command": violate_with(b"", b"MDPW01", b"\x42"),
    "a reply without an address": lambda worker: worker.send(REPLY, []),
    "a reply to nothing": lambda worker: worker.send(REPLY, [b"nobody", b"", b"x"]),
    "a reply to nothing without the empty frame": lambda worker: worker.send(REPLY, [b"nobody", b"x"]),
}


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("violation", VIOLATIONS.values(), ids=list(VIOLATIONS))
def test_who_breaks_the_protocol_is_blamed_and_not_the_job(
    peers: Peers, shape: Shape, violation: Callable[[GuideWorker], None]
) -> None:
    """Each of more workers than a job has lives breaks the protocol while it has that job."""
    client = GuideClient(peers, zmq.DEALER)
    client.send(b"innocent")
    for _ in range(2):
        bad = GuideWorker(peers, shape)
        bad.recv()
        violation(bad)
        frames = bad.hear()
        while frames[2] == HEARTBEAT:
            frames = bad.hear()
        assert frames == [b"", b"MDPW01", DISCONNECT]
        wait_for(lambda: jobs(peers)[0].state is JobState.PENDING, "the job to be given back")
        bad.close(0)
    assert jobs(peers)[0].crash_count == 0
    good = GuideWorker(peers, shape)
    assert good.recv() == [b"innocent"]
    good.reply(b"done")
    assert client.recv() == [b"done"]
    ledger = ready_ledger(Settings(url=peers.broker.url))
    ended = [
        one for one in ledger.workers.list() if peers.service.decode() in one.tasks and one.state is WorkerState.DEAD
    ]
    ledger.close()
    assert len(ended) == 2, "the peers are blamed"


def test_a_listener_hears_of_a_death_and_an_old_client_does_not(
    worker: GuideWorker, client: GuideClient, peers: Peers
) -> None:
    listener = peers.listener()
    listener.ask(peers.service, b"told", correlation=b"c")
    assert worker.recv() == [b"told"]
    client.send(b"untold")
    worker.close(0)
    [told] = listener.notice(b"\x08", b"c")
    assert (told["error"], told["service"]) == ("WORKER_CRASHED", peers.service.decode())
    other = GuideWorker(peers, worker.shape)
    for _ in range(2):
        other.reply(*[b"done " + one for one in other.recv()])
    assert listener.answer(peers.service, b"c") == [b"done told"]
    assert client.recv() == [b"done untold"]


def test_a_late_reply_counts_after_the_broker_was_killed(worker: GuideWorker, peers: Peers) -> None:
    client = peers.listener()
    client.ask(peers.service, b"long", correlation=b"c")
    assert worker.recv() == [b"long"]
    peers.broker.again()
    worker.reply(b"done")
    # Sent away and back, as the guide's workers do.
    wait_for(lambda: [job.state for job in jobs(peers)] == [JobState.SUCCEEDED], "its reply to count")
    client.ask(b"mmi.notify", cbor2.dumps({"v": 1}))
    heard = [client.hear(), client.hear()]
    assert [b"c", b"", CLIENT, peers.service, b"done"] in heard
