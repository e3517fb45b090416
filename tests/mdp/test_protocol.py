"""What 7/MDP and 8/MMI demand of a broker, shown with raw frames."""

import secrets
from collections.abc import Iterator

import cbor2
import pytest
import zmq
from tests.mdp.broker import CLIENT, DISCONNECT, HEARTBEAT, READY, REPLY, Broker, Peers, broker_on
from tests.mdp.plain_peers import PlainClient

from unstuck.config import Settings
from unstuck.ledger.contract.jobs import JobFilter
from unstuck.ledger.open import ready_ledger


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def broker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with broker_on(request, tmp_path_factory.mktemp("broker"), request.param, heartbeat_interval="200ms") as broker:
        yield broker


@pytest.mark.parametrize("body", [[b"one"], [b"", b"two", b""], [b"x" * 1_000_000], [b"\x00", bytes(range(256))]])
def test_a_request_goes_to_a_worker_and_its_reply_comes_back_as_it_was(peers: Peers, body: list[bytes]) -> None:
    worker, client = peers.worker(), peers.client()
    client.ask(peers.service, *body)
    address, came = worker.request()
    assert came == body
    worker.reply(address, *reversed(body), b"done")
    assert client.answer(peers.service) == [*reversed(body), b"done"]
    assert client.is_silent()
    assert worker.is_idle()


@pytest.mark.parametrize("kind", [zmq.REQ, zmq.DEALER])
def test_a_client_of_the_old_kind_is_served_over_both_kinds_of_sockets(peers: Peers, kind: int) -> None:
    worker = peers.worker()
    client = PlainClient(peers.broker.endpoint, kind, retries=1, timeout_s=30)
    client.socket.send_multipart([*([] if kind == zmq.REQ else [b""]), CLIENT, peers.service, b"hello"])
    address, _body = worker.request()
    worker.reply(address, b"well")
    assert client.socket.poll(30_000)
    assert client.socket.recv_multipart()[-2:] == [peers.service, b"well"]
    client.close()


def test_a_request_without_workers_waits_for_the_first_one(peers: Peers) -> None:
    client = peers.client()
    client.ask(peers.service, b"early")
    assert client.is_silent()
    address, body = peers.worker().request()
    assert body == [b"early"]
    peers.made[-1].reply(address, b"late")
    assert client.answer(peers.service) == [b"late"]


def test_requests_of_one_service_are_done_in_their_order_and_one_at_a_time(peers: Peers) -> None:
    client, worker = peers.client(), peers.worker()
    for number in range(5):
        client.ask(peers.service, b"%d" % number)
    for number in range(5):
        address, body = worker.request()
        assert body == [b"%d" % number]
        assert number or worker.is_idle(), "a second request before the reply to the first"
        worker.reply(address, body[0])
        assert client.answer(peers.service) == [b"%d" % number]


def test_no_client_waits_for_all_requests_of_another(peers: Peers) -> None:
    """Fair as a queue is: who comes second is behind what was there, and not behind what came after it."""
    greedy, modest, worker = peers.client(), peers.client(), peers.worker()
    for _ in range(3):
        greedy.ask(peers.service, b"greedy")
    address, _ = worker.request()
    modest.ask(peers.service, b"modest")
    modest.ask(b"mmi.service", b"x")
    assert modest.answer(b"mmi.service") == [b"404"]
    for _ in range(20):
        greedy.ask(peers.service, b"greedy")
    seen = []
    while b"modest" not in seen:
        worker.reply(address, b"")
        address, body = worker.request()
        seen += body
    assert len(seen) <= 3
    worker.reply(address, b"for you")
    assert modest.answer(peers.service) == [b"for you"]


def test_both_sides_beat(peers: Peers) -> None:
    worker = peers.worker()
    for _ in range(3):
        assert worker.hear() == [b"", b"MDPW01", HEARTBEAT]
    client = peers.client()
    client.ask(peers.service, b"")
    address, _ = worker.request()
    worker.tell(HEARTBEAT)
    assert worker.hear() == [b"", b"MDPW01", HEARTBEAT], "a busy worker hears nothing"
    worker.reply(address, b"")
    assert client.answer(peers.service) == [b""]


def test_who_says_ready_twice_is_sent_away_and_then_hears_nothing(peers: Peers) -> None:
    worker = peers.worker()
    worker.tell(READY, peers.service)
    worker.is_sent_away()
    peers.broker.awaits(peers.service, served=False)
    peers.client().ask(peers.service, b"")
    assert worker.is_silent(0.6), "something came after DISCONNECT, if only a beat"


@pytest.mark.parametrize(
    "frames",
    [[HEARTBEAT], [REPLY, b"somewhere", b"", b"body"], [b"\x02"], [b"\x63"], [b""], [READY], [b"\x06"], [REPLY]],
    ids=["beat", "reply", "request", "unknown", "empty", "ready-for-nothing", "processes", "bare-reply"],
)
def test_who_never_said_ready_is_told_to_begin_anew(peers: Peers, frames: list[bytes]) -> None:
    stranger = peers.stranger()
    stranger.tell(*frames)
    stranger.is_sent_away()
    assert stranger.is_silent()
    stranger.tell(READY, peers.service)
    peers.broker.awaits(peers.service)


def test_a_reply_that_nobody_asked_for_ends_a_worker(peers: Peers) -> None:
    worker = peers.worker()
    worker.reply(b"nobody", b"unasked")
    worker.is_sent_away()
    peers.broker.awaits(peers.service, served=False)


def test_who_leaves_in_order_gets_nothing_more(peers: Peers) -> None:
    worker = peers.worker()
    worker.tell(DISCONNECT)
    peers.broker.awaits(peers.service, served=False)
    while not worker.is_silent(0.0):
        worker.hear()
    client = peers.client()
    client.ask(peers.service, b"left over")
    assert worker.is_silent(0.6)
    second = peers.worker()
    address, body = second.request()
    assert body == [b"left over"]
    second.reply(address, b"done")
    assert client.answer(peers.service) == [b"done"]


def test_a_silent_worker_is_given_up_and_told_once(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """That one which beats is not given up is shown with a clock of its own, among the rules."""
    settings = {"heartbeat_interval": "200ms", "heartbeat_timeout": "500ms"}
    with broker_on(request, tmp_path_factory.mktemp("beats"), "sqlite", **settings) as broker:
        peers = Peers(broker)
        silent = peers.stranger()
        silent.tell(READY, b"silent")
        heard: list[bytes] = []
        while DISCONNECT not in heard:
            heard.append(silent.hear()[2])
        broker.awaits(b"silent", served=False)
        assert silent.is_silent(0.5), "something came after DISCONNECT"
        peers.close()


# 8/MMI -----------------------------------------------------------------------------------------


def test_mmi_service_knows_who_is_there(peers: Peers) -> None:
    client = peers.client()
    assert client.call(b"mmi.service", peers.service) == [b"404"]
    worker = peers.worker()
    assert client.call(b"mmi.service", peers.service) == [b"200"]
    client.ask(peers.service, b"")
    worker.request()
    assert client.call(b"mmi.service", peers.service) == [b"200"], "a busy worker is there too"
    worker.close()
    peers.broker.awaits(peers.service, served=False)
    for strange in (b"", b"\x00\xff", b"n" * 300):
        assert client.call(b"mmi.service", strange) == [b"404"]


@pytest.mark.parametrize("name", [b"mmi.", b"mmi.x", b"mmi.servicee", b"mmi.service.x", b"mmi.SERVICE"])
def test_an_unknown_question_is_answered_with_501(peers: Peers, name: bytes) -> None:
    assert peers.client().call(name, b"body") == [b"501"]


@pytest.mark.parametrize("name", [b"mmi.x", b"mmi.service", b"mmi."])
def test_nobody_serves_mmi_but_the_broker(peers: Peers, name: bytes) -> None:
    worker = peers.stranger()
    worker.tell(READY, name)
    worker.is_sent_away()
    assert worker.is_silent()
    assert peers.client().call(b"mmi.x", b"") == [b"501"]
    several = peers.stranger()
    several.tell(READY, peers.service, name)
    several.is_sent_away()
    assert peers.client().call(b"mmi.service", peers.service) == [b"404"]


def test_mmi_tells_of_jobs_services_workers_and_health(peers: Peers) -> None:
    client, worker = peers.client(), peers.worker()
    name = peers.service.decode()
    client.ask(peers.service, b"question")
    address, _ = worker.request()
    code, told = client.call(b"mmi.list", b"")
    assert code == b"200"
    assert name in [one["service"] for one in cbor2.loads(told)["services"]]
    code, told = client.call(b"mmi.workers", b"")
    assert [one["services"] for one in cbor2.loads(told)["workers"] if name in one["services"]] == [[name]]
    code, told = client.call(b"mmi.health", b"")
    assert code == b"200"
    assert cbor2.loads(told)["status"] in ("ok", "degraded", "failing")
    ledger = ready_ledger(Settings(url=peers.broker.url))
    (job,) = ledger.jobs.list(JobFilter(task=name))
    ledger.close()
    code, told = client.call(b"mmi.status", b"%d" % job.id)
    assert (code, cbor2.loads(told)["state"], cbor2.loads(told)["final"]) == (b"200", "running", False)
    worker.reply(address, b"answer", b"of two frames")
    assert client.answer(peers.service) == [b"answer", b"of two frames"]
    code, told, *body = client.call(b"mmi.status", cbor2.dumps({"job_id": job.id}))
    assert (code, cbor2.loads(told)["state"]) == (b"200", "succeeded")
    assert body == [b"answer", b"of two frames"], "the reply waits for whoever asks for it"


@pytest.mark.parametrize(
    "said", [b"", b"x", b"-1", b"9" * 18, b"9" * 19, b"\xff", cbor2.dumps({"job_id": 10**5000}), b"\xa1\x66job_id\xf6"]
)
def test_the_status_of_what_never_was_is_404(peers: Peers, said: bytes) -> None:
    assert peers.client().call(b"mmi.status", said) == [b"404"]


# Our own words ---------------------------------------------------------------------------------


def test_a_worker_may_serve_several_services(peers: Peers) -> None:
    first, second = peers.service + b".a", peers.service + b".b"
    worker, client = peers.worker(first, second), peers.client()
    for service in (first, second):
        client.ask(service, service)
        address, body = worker.request()
        worker.reply(address, b"did", *body)
        assert client.answer(service) == [b"did", service]


def test_several_calls_in_one_request_are_answered_together_and_in_their_order(peers: Peers) -> None:
    client, first, second = peers.client(), peers.worker(), peers.worker()
    calls = [cbor2.dumps({"number": number}) for number in range(2)]
    client.ask(peers.service, cbor2.dumps({"priority": 3}), *calls)
    held = {tuple(body): (worker, address) for worker in (first, second) for address, body in [worker.request()]}
    assert sorted(body[1] for body in held) == sorted(calls)
    for body, (worker, address) in sorted(held.items(), reverse=True):
        assert client.is_silent(0.05), "a reply before the last call had ended"
        worker.reply(address, b"did " + body[1])
    assert client.answer(peers.service) == [b"did " + call for call in calls]
    assert client.is_silent()


def test_priority_goes_first(peers: Peers) -> None:
    client = peers.client()
    for number, priority in enumerate((0, 5, 9)):
        client.ask(peers.service, cbor2.dumps({"priority": priority}), cbor2.dumps({"number": number}))
    assert client.call(b"mmi.service", b"after-them") == [b"404"]
    worker = peers.worker()
    seen = []
    for _ in range(3):
        address, body = worker.request()
        seen.append(cbor2.loads(body[1])["number"])
        worker.reply(address, b"")
    assert seen == [2, 1, 0]


def test_the_same_key_is_done_once_and_answered_to_both(peers: Peers) -> None:
    first, second, worker = peers.listener(), peers.listener(), peers.worker()
    tag = cbor2.dumps({"idempotency_key": secrets.token_hex(8), "tag": 1})
    first.ask(peers.service, b"pay", correlation=tag)
    address, _body = worker.request()
    second.ask(peers.service, b"pay", correlation=tag)
    assert worker.is_idle()
    worker.reply(address, b"paid")
    assert first.answer(peers.service, tag) == [b"paid"]
    assert second.answer(peers.service, tag) == [b"paid"]
    second.ask(peers.service, b"pay", correlation=tag)
    assert second.answer(peers.service, tag) == [b"paid"], "also when it has long been done"
    assert worker.is_idle()
    assert first.is_silent()
    assert second.is_silent()


KEY = secrets.token_hex(8)
DIFFERENT_KEYS = [
    f"{KEY}{'x' * 300}",
    f"{KEY}{'x' * 150}y{'x' * 149}",
    f"{KEY}\0",
    f"{KEY}\\x00",
    f"{KEY}#0",
    int(KEY, 16),
    KEY.encode(),
    f"{KEY}x".encode(),
    f"{KEY}\0".encode(),
    f"{KEY}{'x' * 300}".encode(),
    0.1 + int(KEY[:8], 16),
    1 << 200 | int(KEY, 16),
    -(1 << 200 | int(KEY, 16)),
]


def test_different_keys_are_different_jobs(peers: Peers) -> None:
    """However long they are, and whatever is in them."""
    client, worker = peers.listener(), peers.worker()
    for round_ in range(2):
        for place, key in enumerate(DIFFERENT_KEYS):
            tag = cbor2.dumps({"idempotency_key": key, "tag": place})
            client.ask(peers.service, b"%d" % place, correlation=tag)
            if round_ == 0:
                address, body = worker.request()
                assert body == [b"%d" % place], key
                worker.reply(address, b"done %d" % place)
            assert client.answer(peers.service, tag) == [b"done %d" % place]
    assert worker.is_idle()


def test_a_whole_number_is_the_same_key_as_an_integer_and_as_a_float(peers: Peers) -> None:
    """JavaScript has floats alone, and its libraries write large ones as such."""
    client, worker = peers.listener(), peers.worker()
    number = secrets.randbits(50)
    tags = [cbor2.dumps({"idempotency_key": key, "tag": 1}) for key in (number, float(number))]
    client.ask(peers.service, b"pay", correlation=tags[0])
    address, _ = worker.request()
    worker.reply(address, b"paid")
    assert client.answer(peers.service, tags[0]) == [b"paid"]
    client.ask(peers.service, b"pay", correlation=tags[1])
    assert client.answer(peers.service, tags[1]) == [b"paid"]
    assert worker.is_idle()


def test_the_keys_of_several_calls_are_no_keys_of_single_ones(peers: Peers) -> None:
    client, worker = peers.listener(), peers.worker()
    key = secrets.token_hex(8)
    single = cbor2.dumps({"idempotency_key": f"{key}#1"})
    client.ask(peers.service, b"single", correlation=single)
    address, body = worker.request()
    assert body == [b"single"]
    worker.reply(address, b"one")
    assert client.answer(peers.service, single) == [b"one"]
    several = cbor2.dumps({"several": True})
    options = cbor2.dumps({"idempotency_key": key})
    for round_ in range(2):
        client.ask(peers.service, options, cbor2.dumps({"n": 0}), cbor2.dumps({"n": 1}), correlation=several)
        for number in range(0 if round_ else 2):
            address, body = worker.request()
            assert cbor2.loads(body[1]) == {"n": number}
            worker.reply(address, b"part %d" % number)
        assert client.answer(peers.service, several) == [b"part 0", b"part 1"]
    assert worker.is_idle()


def test_without_a_key_it_is_done_twice(peers: Peers) -> None:
    client, worker = peers.client(), peers.worker()
    for _ in range(2):
        client.ask(peers.service, b"pay")
        address, _ = worker.request()
        worker.reply(address, b"paid")
        assert client.answer(peers.service) == [b"paid"]


def test_words_of_progress_are_taken_and_never_sent(peers: Peers) -> None:
    client, worker = peers.client(), peers.worker()
    client.ask(peers.service, b"")
    address, _ = worker.request()
    worker.tell(b"\x06", address)
    worker.tell(b"\x07", address)
    assert worker.is_idle()
    assert client.is_silent(0.0)
    worker.reply(address, b"done")
    assert client.answer(peers.service) == [b"done"]
    assert worker.is_idle(0.6)
