"""Quick workers have a pile of jobs ready; nobody else goes short for it, and nothing on it is ever held for begun."""

import random

import pytest
from tests.mdp.fake_ledger import FakeLedger, broker, claimed

from unstuck.domain.policy import Policy, encode_policy
from unstuck.ledger.contract.workers import Claimed
from unstuck.mdp.broker import prefetch
from unstuck.mdp.broker.batch import BatchResult
from unstuck.mdp.broker.core import BrokerCore

CLIENT = b"client"


class Floor:
    """A broker, a ledger, and what workers have in their hands."""

    def __init__(self, *workers: bytes) -> None:
        self.core: BrokerCore = broker()
        self.ledger = FakeLedger()
        self.now_s = 0.0
        self.hands: dict[bytes, bytes] = {}
        """What each worker works on."""
        self.answered = 0
        for line, worker in enumerate(workers):
            self.core.on_message(worker, [b"", b"MDPW01", b"\x01", b"echo"], line, self.now_s)
        self.commit()

    def ask(self, count: int) -> None:
        for _ in range(count):
            self.core.on_message(CLIENT, [b"", b"MDPC01", b"echo", b"x"], None, self.now_s)

    def commit(self) -> None:
        if (order := self.core.take_batch()) is not None:
            self.core.on_batch_done(self.ledger.do(order), self.now_s)
        self.look()

    def reply(self, worker: bytes, after_s: float = 0.001) -> None:
        self.now_s += after_s
        self.core.on_message(worker, [b"", b"MDPW01", b"\x03", self.hands.pop(worker), b"", b"y"], None, self.now_s)
        self.look()

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        assert self.now_s >= self.core.next_tick_s(self.now_s)
        self.core.on_tick(self.now_s)
        self.look()

    def look(self) -> None:
        for send in self.core.take_sends():
            if send.frames[1:3] == [b"MDPW01", b"\x02"]:
                assert send.to not in self.hands, "a second request before the reply to the first"
                self.hands[send.to] = send.frames[3]
            self.answered += send.to == CLIENT

    def warm_up(self, *workers: bytes) -> None:
        """Let them be seen to be quick."""
        for _ in range(8):
            self.commit()
            for worker in workers:
                self.reply(worker)
        self.commit()


def pile(floor: Floor, worker: bytes) -> int:
    peer = floor.core.workers.by_identity(worker)
    assert peer is not None
    return len(peer.prefetched)


def test_a_quick_worker_gets_its_next_job_without_a_commit_between() -> None:
    floor = Floor(b"w")
    floor.ask(100)
    floor.warm_up(b"w")
    assert pile(floor, b"w") > prefetch.PREFETCH_LIMIT // 2
    # The ledger is busy with an order, and the worker goes on all the same.
    under_way = floor.core.take_batch()
    for _ in range(10):
        floor.reply(b"w")
        assert b"w" in floor.hands
    answered = floor.answered
    if under_way is not None:
        floor.core.on_batch_done(floor.ledger.do(under_way), floor.now_s)
    assert floor.answered == answered, "answered before the ledger had it"
    floor.commit()
    assert floor.answered == answered + 10


def test_all_are_answered_once_whatever_the_order_of_things() -> None:
    for seed in range(200):
        chance = random.Random(seed)
        workers = [b"a", b"b", b"c"][: chance.randint(1, 3)]
        floor = Floor(*workers)
        asked = 0
        for _ in range(chance.randint(20, 200)):
            match chance.randint(0, 3):
                case 0:
                    floor.ask(1)
                    asked += 1
                case 1:
                    floor.commit()
                case 2:
                    if floor.hands:
                        floor.reply(chance.choice(sorted(floor.hands)), chance.choice([0.0, 0.001, 0.03]))
                case _:
                    floor.now_s += chance.choice([0.001, 0.06])
                    floor.core.on_tick(floor.now_s)
                    floor.look()
        for _ in range(3 * asked + 10):
            floor.commit()
            for worker in sorted(floor.hands):
                floor.reply(worker)
        floor.commit()
        assert (floor.answered, floor.ledger.held, floor.ledger.waiting) == (asked, {}, {}), seed


def test_what_lies_behind_a_slow_job_goes_to_others() -> None:
    floor = Floor(b"w")
    floor.ask(60)
    floor.warm_up(b"w")
    assert pile(floor, b"w")
    floor.wait(prefetch.SLOW_S)
    assert not pile(floor, b"w")
    floor.core.on_message(b"other", [b"", b"MDPW01", b"\x01", b"echo"], 9, floor.now_s)
    floor.commit()
    floor.commit()
    assert set(floor.hands) == {b"w", b"other"}
    assert len(floor.ledger.held) == 2, "more is held than is worked on"


def test_who_was_slow_begins_anew_with_one_at_a_time() -> None:
    floor = Floor(b"w")
    floor.ask(60)
    floor.warm_up(b"w")
    floor.wait(prefetch.SLOW_S)
    floor.commit()
    floor.reply(b"w", after_s=1.0)
    floor.commit()
    assert len(floor.ledger.held) == 1


def test_an_idle_colleague_ends_the_piling() -> None:
    floor = Floor(b"a", b"b")
    floor.ask(50)
    floor.warm_up(b"a", b"b")
    while floor.ledger.waiting or len(floor.ledger.held) > 2:
        for worker in sorted(floor.hands):
            floor.reply(worker)
        floor.commit()
    # Both are idle now and then: two requests are for two.
    for worker in sorted(floor.hands):
        floor.reply(worker)
    floor.commit()
    floor.commit()
    floor.ask(2)
    floor.commit()
    floor.commit()
    assert set(floor.hands) == {b"a", b"b"}


def test_of_a_worker_that_dies_only_what_it_had_counts_as_lost() -> None:
    floor = Floor(b"w")
    floor.ask(60)
    floor.warm_up(b"w")
    had = floor.hands.pop(b"w").split(b".")[0]
    lay_there = pile(floor, b"w")
    assert lay_there
    floor.core.on_connection_closed(0, floor.now_s)
    order = floor.core.take_batch()
    assert order is not None
    (death,) = order.deaths
    assert str(death.job_id).encode() == had
    (hand,) = order.worker_turns.values()
    assert len(hand.release) == lay_there
    floor.core.on_batch_done(floor.ledger.do(order), floor.now_s)
    assert not floor.ledger.held


def test_a_broker_that_leaves_gives_piles_back() -> None:
    floor = Floor(b"w")
    floor.ask(60)
    floor.warm_up(b"w")
    floor.core.close()
    floor.commit()
    assert len(floor.ledger.held) == 1
    assert not pile(floor, b"w")


def test_a_broker_that_wakes_late_hands_out_nothing_of_a_pile_that_others_may_have() -> None:
    floor = Floor(b"w")
    floor.ask(60)
    floor.warm_up(b"w")
    assert pile(floor, b"w")
    floor.reply(b"w", after_s=200.0)
    assert not floor.hands
    assert not pile(floor, b"w")


def test_a_broker_that_wakes_late_hands_out_nothing_that_it_asked_for_before() -> None:
    floor = Floor(b"w")
    floor.ask(1)
    order = floor.core.take_batch(floor.now_s)
    assert order is not None
    answer = floor.ledger.do(order)
    assert answer.claimed
    floor.now_s += 200.0
    floor.core.on_batch_done(answer, floor.now_s)
    floor.look()
    assert not floor.hands
    floor.commit()
    floor.commit()
    assert floor.hands, "it is taken anew, if it is still to be had"


@pytest.mark.parametrize(
    "other",
    [
        {"policy": encode_policy(Policy(on_crash="fail"))},
        {"payload": b"x" * (prefetch.SMALL_BYTES + 1)},
        {"running": False},
    ],
)
def test_what_must_not_run_again_or_is_large_is_never_on_a_pile_or_before_one(other: dict) -> None:
    core = broker()
    core.on_message(b"w", [b"", b"MDPW01", b"\x01", b"echo"], 0, 0.0)
    assert core.take_batch() is not None
    core.on_batch_done(BatchResult(), 0.0)
    peer = core.workers.by_identity(b"w")
    assert peer is not None
    plain = claimed(1, "echo")
    special = Claimed(**{**{name: getattr(plain, name) for name in Claimed.__struct_fields__}, "job_id": 2, **other})
    for found in ((plain, special), (special, plain)):
        if not found[0].running:
            continue
        peer.assignment, peer.prefetch_depth = None, 1
        order = core.take_batch()
        assert order is not None
        assert order.worker_turns[peer.worker_id].claim_count == 2
        core.on_batch_done(BatchResult(claimed={peer.worker_id: found}), 0.0)
        assert peer.assignment is not None
        assert peer.assignment.job is found[0]
        assert (len(peer.prefetched), peer.prefetch_depth) == (0, 0)
        back = core.take_batch()
        assert back is not None
        assert back.worker_turns[peer.worker_id].release == [found[1]]
        core.on_batch_done(BatchResult(), 0.0)
