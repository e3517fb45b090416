"""What makes no sense, what is too large and what comes twice disturbs no broker and nobody else."""

import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

import cbor2
import pytest
from tests.mdp.broker import CLIENT, READY, REPLY, Broker, Peers, RawWorker, broker_on, running, serve_afresh
from tests.support.decoding_bombs import colliding_map
from tests.support.fleet import wait_for
from tests.support.signals import OwnProcess

from unstuck.client.doctor.examine import examine
from unstuck.client.doctor.facts import gather
from unstuck.config import Settings
from unstuck.domain.conditions import Code
from unstuck.ledger.open import ready_ledger
from unstuck.mdp.broker.socket_loop import CUT_OFF, TOO_LARGE

MB = 1024 * 1024


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def broker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with broker_on(request, tmp_path_factory.mktemp("broker"), request.param) as broker:
        yield broker


HUGE = cbor2.dumps(10**5000)
STRANGE = {
    "nothing": [b""],
    "two nothings": [b"", b""],
    "many nothings": [b""] * 50,
    "too many frames": [b"", CLIENT, b"echo", *[b"x"] * 2000],
    "noise": [b"\xff" * 100],
    "no body": [b"", CLIENT, b"echo"],
    "no service": [b"", CLIENT],
    "empty service": [b"", CLIENT, b"", b"body"],
    "unprintable service": [b"", CLIENT, b"\x08", b"body"],
    "long service": [b"", CLIENT, b"s" * 201, b"body"],
    "0.2 client": [b"MDPC02", b"\x01", b"echo", b"body"],
    "0.2 client behind an empty frame": [b"", b"MDPC02", b"\x01", b"echo", b"body"],
    "0.2 worker": [b"MDPW02", b"\x01", b"echo"],
    "0.2 worker behind an empty frame": [b"", b"MDPW02", b"\x01", b"echo"],
    "0.3": [b"", b"MDPC03", b"echo", b"body"],
    "correlation": [b"tag", b"", CLIENT, b"echo", b"body"],
    "correlation of a worker": [b"tag", b"", b"MDPW01", READY, b"echo"],
    "a huge JobID": [b"", CLIENT, b"echo", b"\xa1\x65JobID" + HUGE],
    "huge options": [b"", CLIENT, b"echo", b"\xa1\x68priority" + HUGE, b"\xa0"],
    "a huge lease": [b"", CLIENT, b"mmi.notify", b"\xa2\x61v\x01\x63ttl" + HUGE],
    "a huge status": [b"", CLIENT, b"mmi.status", b"\xa1\x66job_id" + HUGE],
    "deep CBOR": [b"", CLIENT, b"echo", b"\xa1\x61a" + b"\x81" * 100_000 + b"\x01"],
    "deep JSON": [b"", CLIENT, b"echo", b'{"a":' + b"[" * 100_000],
    "a map whose keys collide": [b"", CLIENT, b"echo", colliding_map(130_000)],
    "options whose keys collide": [b"", CLIENT, b"echo", b"\xa1\x61x" + colliding_map(130_000), b"\xa0"],
    "a worker that introduces itself with keys that collide": [
        b"",
        b"MDPW01",
        READY,
        b"strange",
        b"",
        b"\xa1\x68metadata" + colliding_map(60_000),
    ],
    "endless CBOR": [b"", CLIENT, b"echo", b"\xbb" + b"\xff" * 8],
    "reply with a huge address": [b"", b"MDPW01", REPLY, b"9" * 20 + b".1.abc.echo", b"", b"body"],
    "reply with a large address": [b"", b"MDPW01", REPLY, b"9" * 18 + b"." + b"9" * 18 + b".abc.echo", b"", b"body"],
    "ready with words that no database takes": [
        b"",
        b"MDPW01",
        READY,
        b"strange",
        b"",
        cbor2.dumps({"name": "\0", "host": "\0", "metadata": {"\0": "\0", "tag": cbor2.CBORTag(4711, "x")}}),
    ],
    "ready with a strange value": [
        b"",
        b"MDPW01",
        READY,
        b"strange",
        b"",
        cbor2.dumps({"name": 7, "metadata": {"x": cbor2.CBORSimpleValue(99)}}),
    ],
    "ready with huge words": [b"", b"MDPW01", READY, b"strange", b"", cbor2.dumps({"metadata": {"x": "x" * MB}})],
}


def test_frames_that_make_no_sense_disturb_nobody(peers: Peers, subtests: pytest.Subtests) -> None:
    for name in STRANGE:
        with subtests.test(name):
            stranger = peers.client()
            stranger.say(*STRANGE[name])
            named = peers.client(secrets.token_bytes(16))
            named.say(*STRANGE[name])
            peers.broker.is_well()


def test_who_said_something_strange_gets_no_answer_and_its_next_request_is_served(
    peers: Peers, subtests: pytest.Subtests
) -> None:
    for name in [name for name in STRANGE if name.startswith(("0.2 client", "no", "correlation"))]:
        with subtests.test(name):
            client = peers.client()
            if not name.startswith("correlation of"):
                client.say(*STRANGE[name])
            assert client.call(b"mmi.service", b"nobody-there") == [b"404"]
            assert client.is_silent(0.1)


def test_frames_of_ten_megabytes_are_dropped_and_nothing_else(peers: Peers) -> None:
    worker, other = peers.worker(), peers.client()
    for identity in (None, secrets.token_bytes(16)):
        client = peers.client(identity)
        client.ask(peers.service, b"x" * 10 * MB)
        client.ask(peers.service, *[b"x" * MB] * 10)
    other.ask(peers.service, b"small")
    address, body = worker.request()
    assert body == [b"small"], "more than a message may have"
    worker.reply(address, b"x" * 7 * MB)
    assert other.answer(peers.service) == [b"x" * 7 * MB]
    peers.broker.is_well()


def test_a_client_that_never_reads_costs_the_others_nothing(peers: Peers) -> None:
    worker = peers.worker()
    deaf = peers.client(rcvhwm=1, rcvbuf=4096)
    memory = OwnProcess(peers.broker.process.pid)
    before = memory.memory_info().rss
    for _ in range(150):
        deaf.ask(peers.service, b"x" * 100_000)
    other = peers.client()
    for _ in range(150):
        address, body = worker.request()
        worker.reply(address, *body)
    other.ask(peers.service, b"and me?")
    address, body = worker.request()
    worker.reply(address, *body)
    assert other.answer(peers.service) == [b"and me?"]
    assert memory.memory_info().rss - before < 200 * MB


def test_old_clients_that_give_up_and_ask_again_make_a_new_job(peers: Peers) -> None:
    script = ("client", peers.broker.endpoint, peers.service.decode(), "again", "--timeout", 0.5)
    with running("tests.mdp.plain_peers", *script) as process:
        assert process.stdout is not None
        assert process.stdout.read().strip() == "silence"
    worker = peers.worker()
    for _ in range(3):
        address, body = worker.request()
        assert body == [b"again"]
        worker.reply(address, b"too late")
    assert worker.is_idle()


def test_two_replies_to_one_request_end_the_worker_and_reach_the_client_once(peers: Peers) -> None:
    client, worker = peers.client(), peers.worker()
    client.ask(peers.service, b"job")
    address, _ = worker.request()
    worker.reply(address, b"first")
    worker.reply(address, b"second")
    assert client.answer(peers.service) == [b"first"]
    worker.is_sent_away()
    assert client.is_silent()


def test_peers_that_come_and_go_without_end_keep_nobody_waiting(peers: Peers) -> None:
    """One connection says READY over and over, each second one a breach; others say it once and are gone."""
    endless = peers.stranger()
    for _ in range(20_000):
        endless.tell(READY, b"churn")
    for _ in range(200):
        gone = RawWorker(peers.broker.endpoint, b"churn")
        gone.close(1000)
    for number in range(5):
        for _ in range(500):
            endless.tell(READY, b"churn")
        # Before, it took the time of ten thousand deaths.
        serve_afresh(peers, number)
    assert peers.client().call(b"mmi.health", b"")[0] == b"200"


@pytest.mark.parametrize("dialect", ["sqlite", "postgres"])
@pytest.mark.parametrize("reap", ["true", "false"])
def test_what_is_dropped_shows_in_metrics_log_and_doctor(
    request: pytest.FixtureRequest, tmp_path: Path, dialect: str, reap: str
) -> None:
    with broker_on(request, tmp_path, dialect, max_message_bytes=100_000, reap=reap) as broker:
        peers = Peers(broker)
        worker, client = peers.worker(), peers.client()
        for _ in range(3):
            client.ask(peers.service, b"x" * 200_000)
        peers.client().ask(peers.service, b"x" * 2_000_000)
        # Before others come: one of them could get the number of its connection, and speak in the same moment.
        wait_for(lambda: CUT_OFF in broker.log.read_text(), "the word about the request that was cut off")
        host, port = broker.endpoint.removeprefix("tcp://").split(":")
        for _ in range(20):
            # A check of somebody's load balancer is no peer.
            socket.create_connection((host, int(port))).close()
        listener = peers.listener()
        listener.ask(peers.service, b"give me much")
        address, _body = worker.request()
        worker.reply(address, b"x" * 200_000)
        assert cbor2.loads(listener.answer(peers.service)[0])["error"] == "RESULT_NOT_STORABLE"
        client.ask(peers.service, b"small")
        address, body = worker.request()
        worker.reply(address, *body)
        assert client.answer(peers.service) == [b"small"], "the same worker goes on"
        peers.close()
        assert broker.stop() == 0
        said = [line for line in broker.log.read_text().splitlines() if TOO_LARGE in line]
        assert len(said) == 1, said
        settings = Settings(url=broker.url)
        ledger = ready_ledger(settings)
        found = {finding.code: finding for finding in examine(gather(ledger, settings))}
        ledger.close()
        reasons = found[Code.MDP_DROPPED].facts["reasons"]
        assert reasons[TOO_LARGE] == 4
        assert 1 <= reasons[CUT_OFF] < 10, "libzmq connects again, and says nothing more"
        broker.start()
