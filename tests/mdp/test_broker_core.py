"""The broker's rules without sockets and databases: whatever comes, nobody hears more than it asked for."""

from collections import Counter

import cbor2
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.mdp.told import Told, broker, claimed

from unstuck.domain.endings import JobError
from unstuck.domain.states import JobState
from unstuck.mdp.broker.mmi import MAX_LISTENERS
from unstuck.mdp.broker.orders import Answer
from unstuck.store.records import Letter, Outcome

HEADERS = [b"", b"MDPC01", b"MDPW01", b"MDPC02", b"MDPW02"]
COMMANDS = [bytes([number]) for number in range(10)]
NAMES = [b"echo", b"sum", b"mmi.service", b"mmi.notify", b"mmi.status", b"mmi.x"]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
KEYS = st.sampled_from(
    ["v", "ttl", "events", "priority", "JobID", "job_id", "idempotency_key", "error", "metadata", "name", "host"]
)
MAPS = st.dictionaries(KEYS, VALUES | st.just(1), max_size=4).map(cbor2.dumps)
HUGE = [cbor2.dumps({name: 10**5000, "v": 1}) for name in ("ttl", "JobID", "priority", "job_id", "error")]
FRAME = st.sampled_from([*HUGE, *HEADERS, *COMMANDS, *NAMES]) | MAPS | st.binary(max_size=8)
MESSAGE = (
    st.lists(FRAME, max_size=8)
    | st.tuples(st.sampled_from(NAMES), st.lists(FRAME, min_size=1, max_size=3)).map(
        lambda pair: [b"", b"MDPC01", pair[0], *pair[1]]
    )
    | st.tuples(st.sampled_from(COMMANDS), st.lists(FRAME, max_size=4)).map(
        lambda pair: [b"", b"MDPW01", pair[0], *pair[1]]
    )
)
OLD, LISTENING = [b"\x00old1", b"old and named"], b"listens to notices"
WORKERS = [b"w1", b"w2"]
STEP = st.one_of(
    st.tuples(st.just("say"), st.sampled_from([*OLD, LISTENING, *WORKERS]), MESSAGE),
    st.tuples(st.just("ask"), st.sampled_from(OLD), st.sampled_from([b"echo", b"sum"])),
    st.tuples(st.just("serve"), st.sampled_from(WORKERS), st.sampled_from([b"echo", b"sum"])),
    st.tuples(st.just("reply"), st.sampled_from(WORKERS), st.sampled_from([b"echo", b"sum"])),
    st.tuples(st.just("end"), st.sampled_from(WORKERS), st.just(b"")),
    st.tuples(st.just("ledger"), st.just(b""), st.just(b"")),
    st.tuples(st.just("wait"), st.just(b""), st.just(b"")),
    st.tuples(st.just("moment"), st.just(b""), st.just(b"")),
)


@settings(max_examples=150)
@given(st.lists(STEP, max_size=30))
def test_whatever_comes_nothing_raises_and_who_did_not_ask_gets_one_reply_per_request(steps: list) -> None:
    core, ledger = broker(), Told()
    asked: Counter[bytes] = Counter()
    heard: Counter[bytes] = Counter()
    addresses: dict[bytes, bytes] = {}
    now_s = 0.0
    core.on_message(LISTENING, [b"", b"MDPC01", b"mmi.notify", cbor2.dumps({"v": 1})], None, now_s)
    for kind, who, what in steps:
        match kind:
            case "say":
                asked[who] += b"MDPC01" in what[:3]
                core.on_message(who, what, 7 if b"\x01" in what else None, now_s)
            case "ask":
                asked[who] += 1
                core.on_message(who, [b"", b"MDPC01", what, b"body"], None, now_s)
            case "serve":
                core.on_message(who, [b"", b"MDPW01", b"\x01", what], WORKERS.index(who), now_s)
            case "reply":
                core.on_message(
                    who, [b"", b"MDPW01", b"\x03", addresses.get(who, b"1.2.x.y"), b"", b"done"], None, now_s
                )
            case "end":
                core.on_gone(WORKERS.index(who), now_s)
            case "ledger":
                if (order := core.take_order()) is not None:
                    core.on_answer(ledger.do(order), now_s)
            case "wait":
                now_s += 3.0
                core.on_tick(now_s)
            case "moment":
                now_s += 0.06
                core.on_tick(now_s)
        for send in core.take_sends():
            assert all(isinstance(frame, bytes) for frame in send.frames)
            if send.frames[1:3] == [b"MDPW01", b"\x02"]:
                addresses[send.to] = send.frames[3]
            if send.to in OLD and b"MDPC01" in send.frames[:3]:
                heard[send.to] += 1
                at = send.frames.index(b"MDPC01")
                assert send.frames[at + 1] not in (b"\x08", b"\x09"), "a notice to somebody who never asked"
    for client in OLD:
        assert heard[client] <= asked[client]


def test_what_was_found_for_a_worker_that_left_meanwhile_goes_back_before_it_is_retired() -> None:
    for last_word in (
        lambda core: core.on_message(b"w", [b"", b"MDPW01", b"\x05"], None, 2.0),
        lambda core: core.on_gone(3, 2.0),
    ):
        core = broker()
        core.on_message(b"w", [b"", b"MDPW01", b"\x01", b"echo"], 3, 0.0)
        born = core.take_order()
        assert born is not None
        core.on_answer(Answer(), 0.0)
        wanting = core.take_order()
        assert wanting is not None
        (worker_id,) = wanting.hands
        last_word(core)
        assert core.take_order() is None
        core.on_answer(Answer(claimed={worker_id: (claimed(5, "echo"),)}), 2.0)
        after = core.take_order()
        assert after is not None
        assert after.hands[worker_id].release == [claimed(5, "echo")]
        assert [*after.retired, *(death.worker_id for death in after.deaths)] == [worker_id]
        assert not [send for send in core.take_sends() if send.frames[2] == b"\x02"]


def test_a_reply_and_a_renewed_wish_in_one_round_make_one_reply() -> None:
    core, ledger = broker(), Told()
    wish = [b"", b"MDPC01", b"mmi.notify", cbor2.dumps({"v": 1})]

    def round_(answer_more: dict | None = None) -> None:
        order = core.take_order()
        if order is not None:
            answer = ledger.do(order)
            answer.letters = answer_more or {}
            core.on_answer(answer, 0.0)

    core.on_message(LISTENING, wish, None, 0.0)
    core.on_message(b"w", [b"", b"MDPW01", b"\x01", b"echo"], 3, 0.0)
    core.on_message(LISTENING, [b"tag", b"", b"MDPC01", b"echo", b"x"], None, 0.0)
    round_()
    round_()
    address = next(send.frames[3] for send in core.take_sends() if send.frames[2] == b"\x02")
    core.on_message(b"w", [b"", b"MDPW01", b"\x03", address, b"", b"done"], None, 0.0)
    core.on_message(LISTENING, wish, None, 0.0)
    letter = Letter(client=LISTENING, service="echo", request_id="r", correlation=b"tag", notify=True, job_id=1)
    round_({LISTENING: [letter]})
    replies = [send for send in core.take_sends() if send.frames[0] == b"tag"]
    assert len(replies) == 1
    assert len(core.requests) == 0, "it waits for what it has"


def test_what_strangers_say_makes_no_list_without_end() -> None:
    core = broker()
    for number in range(1000):
        core.on_message(b"x", [b"", b"MDPW01", b"%d" % number], None, 0.0)
        core.on_message(b"x", [b"%d" % number], None, 0.0)
    assert len(core.dropped.counts) < 10
    assert sum(core.dropped.counts.values()) == 2000


def test_a_death_is_told_in_the_moment_of_the_verdict() -> None:
    core, ledger = broker(), Told()
    core.on_message(LISTENING, [b"", b"MDPC01", b"mmi.notify", cbor2.dumps({"v": 1})], None, 0.0)
    core.on_message(b"w", [b"", b"MDPW01", b"\x01", b"echo"], 3, 0.0)
    core.on_message(LISTENING, [b"tag", b"", b"MDPC01", b"echo", b"x"], None, 0.0)
    while (order := core.take_order()) is not None:
        core.on_answer(ledger.do(order), 0.0)
    core.take_sends()
    core.on_gone(3, 1.0)
    order = core.take_order()
    assert order is not None
    assert [death.job_id for death in order.deaths] == [1]
    assert core.take_sends() == [], "nothing is said before the ledger has it"
    core.on_answer(ledger.do(order), 1.0)
    # Neither a tick nor another message is needed.
    (told,) = [send.frames for send in core.take_sends() if send.to == LISTENING]
    assert told[:4] == [b"tag", b"", b"MDPC01", b"\x08"]
    assert 150 <= sum(map(len, told)) <= 300


def test_a_request_that_expires_while_it_is_looked_at_ends_with_its_last_word() -> None:
    core, ledger = broker(request_ttl="5s"), Told()
    core.on_message(LISTENING, [b"", b"MDPC01", b"mmi.notify", cbor2.dumps({"v": 1})], None, 0.0)
    core.on_message(LISTENING, [b"tag", b"", b"MDPC01", b"echo", b"x"], None, 0.0)
    while (order := core.take_order()) is not None:
        core.on_answer(ledger.do(order), 0.0)
    core.take_sends()
    late_s = 6.0
    core.on_tick(late_s)
    order = core.take_order()
    assert order is not None
    assert order.overdue == order.look_at == [1], "both at once"
    cancelled = Outcome(1, JobState.CANCELLED, None, JobError("CANCELLED", "Job was cancelled", None, {}))
    core.on_answer(Answer(expired=[1], outcomes=[cancelled]), late_s)
    words = [send.frames[3] for send in core.take_sends() if send.to == LISTENING]
    assert words == [b"\x09"], "no reply follows the last word"


def test_what_is_blocked_waits_alone_and_the_end_of_its_worker_behind_it() -> None:
    core, ledger = broker(), Told()
    client, other = b"\x00old1", b"\x00old2"

    def write(now_s: float) -> None:
        order = core.take_order(now_s)
        assert order is not None
        core.on_answer(ledger.do(order), now_s)

    def heard_by(who: bytes) -> list[list[bytes]]:
        return [send.frames for send in core.take_sends() if send.to == who]

    core.on_message(b"w", [b"", b"MDPW01", b"\x01", b"echo"], 3, 0.0)
    core.on_message(client, [b"", b"MDPC01", b"echo", b"first"], None, 0.0)
    write(0.0)
    write(0.0)
    [address] = [frames[3] for frames in heard_by(b"w") if frames[2] == b"\x02"]
    ledger.locked.add(1)
    core.on_message(b"w", [b"", b"MDPW01", b"\x03", address, b"", b"done"], None, 1.0)
    write(1.0)
    core.on_gone(3, 1.0)
    core.on_message(other, [b"", b"MDPC01", b"echo", b"second"], None, 1.0)
    order = core.take_order(1.01)
    assert order is not None
    assert (order.deaths, order.again, len(order.posts)) == ([], None, 1)
    core.on_answer(ledger.do(order), 1.01)
    assert heard_by(client) == []
    assert 1.0 < core.next_tick_s(1.01) <= 1.2
    write(1.2)
    assert ledger.held == {1: "id2"}, "blocked again"
    ledger.locked.clear()
    order = core.take_order(5.0)
    assert order is not None
    assert order.again is not None
    assert [death.worker_id for death in order.again.deaths] == ["id2"]
    core.on_answer(ledger.do(order), 5.0)
    assert heard_by(client) == [[b"", b"MDPC01", b"echo", b"done"]]
    assert "id2" not in ledger.services
    write(5.1)
    assert not core.busy_with_ledger


def test_requests_of_a_client_keep_their_order_behind_one_that_is_blocked() -> None:
    core, ledger = broker(), Told()
    ledger.locked_clients.add(b"a")
    for who, body in ((b"a", b"1"), (b"b", b"1"), (b"a", b"2")):
        core.on_message(who, [b"", b"MDPC01", b"echo", body], None, 0.0)
    order = core.take_order(0.0)
    assert order is not None
    core.on_answer(ledger.do(order), 0.0)
    ledger.locked_clients.clear()
    core.on_message(b"a", [b"", b"MDPC01", b"echo", b"3"], None, 0.0)
    core.on_message(b"b", [b"", b"MDPC01", b"echo", b"2"], None, 0.0)
    order = core.take_order(0.0)
    assert order is not None
    assert [post.asked.client for post in order.posts] == [b"b"]
    core.on_answer(ledger.do(order), 0.0)
    order = core.take_order(1.0)
    assert order is not None
    assert order.again is not None
    assert [post.call.job.payload[-1:] for post in order.again.posts] == [b"1", b"2", b"3"]


def test_an_outage_makes_no_list_of_questions_without_end() -> None:
    core, ledger = broker(request_ttl="5s"), Told()
    for number in range(20):
        core.on_message(OLD[0], [b"", b"MDPC01", b"echo", b"%d" % number], None, 0.0)
    while (order := core.take_order()) is not None:
        core.on_answer(ledger.do(order), 0.0)
    core.on_tick(0.1)
    under_way = core.take_order(0.1)
    assert under_way is not None
    now_s = 0.1
    for _ in range(10_000):
        # As the loop does it: it ticks when the rules say so, and no more often.
        now_s = max(core.next_tick_s(now_s), now_s)
        if now_s > 60:
            break
        core.on_tick(now_s)
    assert now_s > 60, "it ticks all the time for nothing"
    core.on_answer(ledger.do(under_way), now_s)
    order = core.take_order(now_s)
    assert order is not None
    assert len(order.look_at) <= 20
    assert sorted(order.overdue) == list(range(1, 21))


def test_clients_that_are_gone_keep_nobody_from_listening() -> None:
    core = broker()
    wish = [b"", b"MDPC01", b"mmi.notify", cbor2.dumps({"v": 1, "ttl": 3600})]

    def answer_to(client: bytes) -> bytes:
        core.on_message(client, wish, None, 0.0)
        (said,) = [send.frames[3] for send in core.take_sends() if send.to == client]
        return said

    names = [b"listener of the test %d" % number for number in range(MAX_LISTENERS)]
    assert {answer_to(name) for name in names} == {b"200"}
    assert answer_to(b"one more than there is room for") == b"403"
    core.on_client_gone(names[5])
    assert answer_to(b"one that takes its place") == b"200"
    assert answer_to(b"one more than there is room for") == b"403"
    assert answer_to(names[4]) == b"200", "whoever has a lease renews it"
