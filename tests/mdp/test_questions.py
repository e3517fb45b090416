"""Clients ask without end: each gets its turn, the ledger is asked once for many, and nobody else waits."""

import secrets
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import cbor2
import pytest
import zmq
from tests.mdp import broker as mdp_broker
from tests.mdp.broker import Peers, broker_on, serve_afresh
from tests.mdp.fake_ledger import broker as core_broker

from unstuck.config import Settings
from unstuck.ledger.open import ready_ledger
from unstuck.mdp.broker import batch_runner
from unstuck.mdp.broker.backlog import MAX_BODY_BYTES, MAX_QUERIES_PER_CLIENT, MAX_TAKEN, PORTION, QueryQueue
from unstuck.mdp.broker.batch import BatchResult, MmiQuery
from unstuck.mdp.broker.core import BrokerCore
from unstuck.mdp.broker.mmi import MmiAnswers
from unstuck.recovery.reap import Reaper
from unstuck.worker.registration import new_worker_id


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def broker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[mdp_broker.Broker]:
    with broker_on(request, tmp_path_factory.mktemp("broker"), request.param) as broker:
        yield broker


def question(client: bytes, body: bytes, name: str = "mmi.status") -> MmiQuery:
    return MmiQuery(client, None, name, (body,))


def test_each_client_has_its_turn_and_equal_questions_count_once() -> None:
    questions = QueryQueue()
    for number in range(50):
        assert questions.add(question(b"greedy", b"%d" % number))
    assert questions.add(question(b"modest", b"1"))
    assert [one.client for one in questions.take(4)] == [b"greedy", b"modest", b"greedy", b"greedy", b"greedy"]
    for number in range(40):
        assert questions.add(question(b"client-%d" % number, b"", "mmi.health"))
    taken = questions.take(2)
    assert len([one for one in taken if one.name == "mmi.health"]) == 40, "one look at the ledger is enough for them"
    assert len(questions) == 50 + 1 + 40 - 5 - len(taken)


def test_questions_are_bounded_in_number_and_size() -> None:
    questions = QueryQueue()
    added = [questions.add(question(b"greedy", b"")) for _ in range(2 * MAX_QUERIES_PER_CLIENT)]
    assert added.count(True) == MAX_QUERIES_PER_CLIENT
    assert not questions.add(question(b"large", b"x" * (MAX_BODY_BYTES + 1)))
    for number in range(3_000):
        questions.add(question(b"client-%d" % number, b""))
    assert len(questions.take(PORTION)) == MAX_TAKEN
    questions.forget(b"greedy")
    assert b"greedy" not in {one.client for _ in range(5) for one in questions.take(PORTION)}
    assert len(questions) == 0


def test_what_a_client_asked_that_has_gone_is_not_looked_for() -> None:
    core = core_broker()
    for number in range(100):
        core.on_message(b"gone", [b"", b"MDPC01", b"mmi.status", b"%d" % number], None, 0.0)
    for number in range(3 * PORTION):
        identity = b"listener-%08d" % number
        core.on_message(identity, [b"", b"MDPC01", b"mmi.notify", cbor2.dumps({"v": 1})], None, 0.0)
    core.on_client_gone(b"gone")
    core.on_client_gone(b"listener-%08d" % 0)
    order = core.take_batch()
    assert order is not None
    assert order.queries == []
    assert order.resubscribed == [b"listener-%08d" % number for number in range(1, PORTION + 1)]


@pytest.mark.parametrize("dialect", ["sqlite", "postgres"])
def test_the_ledger_is_asked_once_for_all_who_ask_the_same(
    request: pytest.FixtureRequest, tmp_path: Path, dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = request.getfixturevalue("pg_server").new_ledger() if dialect == "postgres" else f"sqlite:///{tmp_path}/l.db"
    settings = Settings(url=url)
    looks: list[str] = []
    answer_of = MmiAnswers.answer

    def counted(self: MmiAnswers, asked: MmiQuery) -> list[bytes]:
        looks.append(asked.name)
        return answer_of(self, asked)

    monkeypatch.setattr(MmiAnswers, "answer", counted)
    with closing(ready_ledger(settings)) as ledger:
        sitting = batch_runner.BatchRunner(ledger, settings, Reaper(ledger, settings.recovery, by="test"))
        core = BrokerCore(settings.mdp, new_worker_id, time.time)
        for number in range(500):
            core.on_message(b"c%d" % number, [b"", b"MDPC01", b"mmi.health", b""], None, 0.0)
        order = core.take_batch()
        assert order is not None
        answer = BatchResult()
        for step in sitting.steps(order, answer):
            step.do()
        core.on_batch_done(answer, 0.0)
        assert len(core.take_sends()) == 500
        assert looks == ["mmi.health"]
        core.on_message(b"c", [b"", b"MDPC01", b"mmi.health", b""], None, 0.0)
        later = core.take_batch()
        assert later is not None
        for step in sitting.steps(later, BatchResult()):
            step.do()
        assert len(looks) == 2, "a later order looks anew"


def test_crowds_that_ask_and_listen_keep_nobody_waiting(peers: Peers) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.max_sockets = 5_000
    crowd = []
    for number in range(1_000):
        client = context.socket(zmq.DEALER)
        client.identity = secrets.token_bytes(16)
        client.connect(peers.broker.endpoint)
        client.send_multipart([b"", b"MDPC01", b"mmi.notify", cbor2.dumps({"v": 1, "ttl": 600})])
        if number < 50:
            for name in (b"mmi.health", b"mmi.list", b"mmi.workers", b"mmi.status"):
                for _ in range(50):
                    client.send_multipart([b"", b"MDPC01", name, b"1"])
        crowd.append(client)
    for number in range(2):
        serve_afresh(peers, number)
    context.destroy(linger=0)
    for number in range(2, 5):
        serve_afresh(peers, number)
