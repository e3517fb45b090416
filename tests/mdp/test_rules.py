"""The broker's rules without sockets and databases: whatever comes, nobody hears more than it asked for."""

from collections import Counter
from math import nan

import cbor2
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.mdp.fake_ledger import FakeLedger, broker, claimed

from unstuck.domain.endings import JobError
from unstuck.domain.states import JobState
from unstuck.errors import CallFailed, ReplyTimeout
from unstuck.ledger.contract.jobs import Outcome
from unstuck.ledger.contract.workers import ReplyAddress
from unstuck.mdp.broker.batch import BatchResult
from unstuck.mdp.broker.jobs import read_calls
from unstuck.mdp.broker.notifications import MAX_SUBSCRIPTIONS
from unstuck.mdp.broker.socket_loop import ClientConnections
from unstuck.mdp.client_session import MAX_CALLS, PATIENCE_S, TTL_S, ClientSession, Mode
from unstuck.mdp.pending_call import PendingCall
from unstuck.mdp.protocol import Request, hear_as_client, hear_as_worker

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
    core, ledger = broker(), FakeLedger()
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
                core.on_connection_closed(WORKERS.index(who), now_s)
            case "ledger":
                if (order := core.take_batch()) is not None:
                    core.on_batch_done(ledger.do(order), now_s)
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


def test_whole_numbers_may_come_as_floats() -> None:
    """JavaScript has floats alone, and its libraries write large ones as such."""
    for said, own_id, priority in ((2.0**53, "9007199254740992", 1000), (3.0, "3", 3), (1.5, None, 0), (nan, None, 0)):
        request = Request(b"echo", (cbor2.dumps({"JobID": said}),), cbor2.dumps({"priority": said}))
        (call,) = read_calls(request, {}, 3, "mdp")
        assert (call.own_id, call.job.priority) == (own_id, priority)


def test_a_worker_is_given_up_for_its_silence_later_if_it_works_and_never_if_it_beats() -> None:
    core, ledger = broker(heartbeat_interval="1s", heartbeat_timeout="2s", busy_timeout="20s"), FakeLedger()
    given_up: dict[bytes, float] = {}

    def settle(now_s: float) -> None:
        while (order := core.take_batch(now_s)) is not None:
            core.on_batch_done(ledger.do(order), now_s)
        for send in core.take_sends():
            if send.frames[1:3] == [b"MDPW01", b"\x05"]:
                assert send.to not in given_up, "it is told once"
                given_up[send.to] = now_s

    for line, (worker, service) in enumerate(((b"idle", b"a"), (b"loud", b"b"), (b"busy", b"c"))):
        core.on_message(worker, [b"", b"MDPW01", b"\x01", service], line, 0.0)
    core.on_message(b"client", [b"", b"MDPC01", b"c", b"x"], None, 0.0)
    settle(0.0)
    for tenth in range(1, 300):
        now_s = tenth / 10
        if tenth % 10 == 0:
            core.on_message(b"loud", [b"", b"MDPW01", b"\x04"], 1, now_s)
        core.on_tick(now_s)
        settle(now_s)
    assert given_up == {b"idle": 2.1, b"busy": 20.1}


def test_what_was_found_for_a_worker_that_left_meanwhile_goes_back_before_it_is_retired() -> None:
    for last_word in (
        lambda core: core.on_message(b"w", [b"", b"MDPW01", b"\x05"], None, 2.0),
        lambda core: core.on_connection_closed(3, 2.0),
    ):
        core = broker()
        core.on_message(b"w", [b"", b"MDPW01", b"\x01", b"echo"], 3, 0.0)
        born = core.take_batch()
        assert born is not None
        core.on_batch_done(BatchResult(), 0.0)
        wanting = core.take_batch()
        assert wanting is not None
        (worker_id,) = wanting.worker_turns
        last_word(core)
        assert core.take_batch() is None
        core.on_batch_done(BatchResult(claimed={worker_id: (claimed(5, "echo"),)}), 2.0)
        after = core.take_batch()
        assert after is not None
        assert after.worker_turns[worker_id].release == [claimed(5, "echo")]
        assert [*after.retired, *(death.worker_id for death in after.deaths)] == [worker_id]
        assert not [send for send in core.take_sends() if send.frames[2] == b"\x02"]


def test_a_reply_and_a_renewed_wish_in_one_round_make_one_reply() -> None:
    core, ledger = broker(), FakeLedger()
    wish = [b"", b"MDPC01", b"mmi.notify", cbor2.dumps({"v": 1})]

    def round_(answer_more: dict | None = None) -> None:
        order = core.take_batch()
        if order is not None:
            answer = ledger.do(order)
            answer.reply_addresses = answer_more or {}
            core.on_batch_done(answer, 0.0)

    core.on_message(LISTENING, wish, None, 0.0)
    core.on_message(b"w", [b"", b"MDPW01", b"\x01", b"echo"], 3, 0.0)
    core.on_message(LISTENING, [b"tag", b"", b"MDPC01", b"echo", b"x"], None, 0.0)
    round_()
    round_()
    address = next(send.frames[3] for send in core.take_sends() if send.frames[2] == b"\x02")
    core.on_message(b"w", [b"", b"MDPW01", b"\x03", address, b"", b"done"], None, 0.0)
    core.on_message(LISTENING, wish, None, 0.0)
    letter = ReplyAddress(client=LISTENING, service="echo", request_id="r", correlation=b"tag", notify=True, job_id=1)
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
    core, ledger = broker(), FakeLedger()
    core.on_message(LISTENING, [b"", b"MDPC01", b"mmi.notify", cbor2.dumps({"v": 1})], None, 0.0)
    core.on_message(b"w", [b"", b"MDPW01", b"\x01", b"echo"], 3, 0.0)
    core.on_message(LISTENING, [b"tag", b"", b"MDPC01", b"echo", b"x"], None, 0.0)
    while (order := core.take_batch()) is not None:
        core.on_batch_done(ledger.do(order), 0.0)
    core.take_sends()
    core.on_connection_closed(3, 1.0)
    order = core.take_batch()
    assert order is not None
    assert [death.job_id for death in order.deaths] == [1]
    assert core.take_sends() == [], "nothing is said before the ledger has it"
    core.on_batch_done(ledger.do(order), 1.0)
    # Neither a tick nor another message is needed.
    (told,) = [send.frames for send in core.take_sends() if send.to == LISTENING]
    assert told[:4] == [b"tag", b"", b"MDPC01", b"\x08"]
    assert 150 <= sum(map(len, told)) <= 300


def test_a_request_that_expires_while_it_is_looked_at_ends_with_its_last_word() -> None:
    core, ledger = broker(request_ttl="5s"), FakeLedger()
    core.on_message(LISTENING, [b"", b"MDPC01", b"mmi.notify", cbor2.dumps({"v": 1})], None, 0.0)
    core.on_message(LISTENING, [b"tag", b"", b"MDPC01", b"echo", b"x"], None, 0.0)
    while (order := core.take_batch()) is not None:
        core.on_batch_done(ledger.do(order), 0.0)
    core.take_sends()
    late_s = 6.0
    core.on_tick(late_s)
    order = core.take_batch()
    assert order is not None
    assert order.overdue == order.to_poll == [1], "both at once"
    cancelled = Outcome(1, JobState.CANCELLED, None, JobError("CANCELLED", "Job was cancelled", None, {}))
    core.on_batch_done(BatchResult(expired=[1], outcomes=[cancelled]), late_s)
    words = [send.frames[3] for send in core.take_sends() if send.to == LISTENING]
    assert words == [b"\x09"], "no reply follows the last word"


def test_what_is_blocked_waits_alone_and_the_end_of_its_worker_behind_it() -> None:
    core, ledger = broker(), FakeLedger()
    client, other = b"\x00old1", b"\x00old2"

    def write(now_s: float) -> None:
        order = core.take_batch(now_s)
        assert order is not None
        core.on_batch_done(ledger.do(order), now_s)

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
    core.on_connection_closed(3, 1.0)
    core.on_message(other, [b"", b"MDPC01", b"echo", b"second"], None, 1.0)
    order = core.take_batch(1.01)
    assert order is not None
    assert (order.deaths, order.retried, len(order.posts)) == ([], None, 1)
    core.on_batch_done(ledger.do(order), 1.01)
    assert heard_by(client) == []
    assert 1.0 < core.next_tick_s(1.01) <= 1.2
    write(1.2)
    assert ledger.held == {1: "id2"}, "blocked again"
    ledger.locked.clear()
    order = core.take_batch(5.0)
    assert order is not None
    assert order.retried is not None
    assert [death.worker_id for death in order.retried.deaths] == ["id2"]
    core.on_batch_done(ledger.do(order), 5.0)
    assert heard_by(client) == [[b"", b"MDPC01", b"echo", b"done"]]
    assert "id2" not in ledger.services
    write(5.1)
    assert not core.busy_with_ledger


def test_requests_of_a_client_keep_their_order_behind_one_that_is_blocked() -> None:
    core, ledger = broker(), FakeLedger()
    ledger.locked_clients.add(b"a")
    for who, body in ((b"a", b"1"), (b"b", b"1"), (b"a", b"2")):
        core.on_message(who, [b"", b"MDPC01", b"echo", body], None, 0.0)
    order = core.take_batch(0.0)
    assert order is not None
    core.on_batch_done(ledger.do(order), 0.0)
    ledger.locked_clients.clear()
    core.on_message(b"a", [b"", b"MDPC01", b"echo", b"3"], None, 0.0)
    core.on_message(b"b", [b"", b"MDPC01", b"echo", b"2"], None, 0.0)
    order = core.take_batch(0.0)
    assert order is not None
    assert [post.request.client for post in order.posts] == [b"b"]
    core.on_batch_done(ledger.do(order), 0.0)
    order = core.take_batch(1.0)
    assert order is not None
    assert order.retried is not None
    assert [post.call.job.payload[-1:] for post in order.retried.posts] == [b"1", b"2", b"3"]


def test_an_outage_makes_no_list_of_questions_without_end() -> None:
    core, ledger = broker(request_ttl="5s"), FakeLedger()
    for number in range(20):
        core.on_message(OLD[0], [b"", b"MDPC01", b"echo", b"%d" % number], None, 0.0)
    while (order := core.take_batch()) is not None:
        core.on_batch_done(ledger.do(order), 0.0)
    core.on_tick(0.1)
    under_way = core.take_batch(0.1)
    assert under_way is not None
    now_s = 0.1
    for _ in range(10_000):
        # As the loop does it: it ticks when the rules say so, and no more often.
        now_s = max(core.next_tick_s(now_s), now_s)
        if now_s > 60:
            break
        core.on_tick(now_s)
    assert now_s > 60, "it ticks all the time for nothing"
    core.on_batch_done(ledger.do(under_way), now_s)
    order = core.take_batch(now_s)
    assert order is not None
    assert len(order.to_poll) <= 20
    assert sorted(order.overdue) == list(range(1, 21))


def test_clients_that_are_gone_keep_nobody_from_listening() -> None:
    core = broker()
    wish = [b"", b"MDPC01", b"mmi.notify", cbor2.dumps({"v": 1, "ttl": 3600})]

    def answer_to(client: bytes) -> bytes:
        core.on_message(client, wish, None, 0.0)
        (said,) = [send.frames[3] for send in core.take_sends() if send.to == client]
        return said

    names = [b"listener of the test %d" % number for number in range(MAX_SUBSCRIPTIONS)]
    assert {answer_to(name) for name in names} == {b"200"}
    assert answer_to(b"one more than there is room for") == b"403"
    core.on_client_gone(names[5])
    assert answer_to(b"one that takes its place") == b"200"
    assert answer_to(b"one more than there is room for") == b"403"
    assert answer_to(names[4]) == b"200", "whoever has a lease renews it"


NO = [b"", b"MDPC01", b"mmi.notify", b"501"]
YES = [b"", b"MDPC01", b"mmi.notify", b"200", cbor2.dumps({"lease": 60})]


def call(body: bytes = b"x", timeout_s: float = 2.5) -> PendingCall:
    return PendingCall("echo", [body], timeout_s)


def said(conversation: ClientSession) -> list[bytes]:
    """Give the last frame of each message since the last look."""
    out = [frames[-1] for frames in conversation.out]
    conversation.out.clear()
    return out


def begun(answer: list[bytes] | None = None) -> ClientSession:
    conversation = ClientSession()
    conversation.begin(0)
    if answer is not None:
        conversation.hear(answer, 0)
    said(conversation)
    return conversation


def test_after_a_timeout_of_a_plain_call_nothing_more_is_said_on_the_old_line() -> None:
    conversation = begun(NO)
    slow, behind = call(b"slow", 0.5), call(b"behind")
    conversation.take(slow, 100)
    conversation.take(behind, 100)
    assert said(conversation) == [b"slow"]
    conversation.tick(100.6)
    assert isinstance(slow.future.exception(), ReplyTimeout)
    assert conversation.must_reopen
    assert b"behind" not in said(conversation)
    conversation.begin(100.6)
    said(conversation)
    conversation.hear(NO, 100.7)
    assert said(conversation) == [b"behind"]
    conversation.tick(103)
    assert not behind.done()
    conversation.tick(103.3)
    assert behind.done()


def test_a_plain_call_that_times_out_on_a_line_of_ours_costs_the_others_nothing() -> None:
    conversation = begun()
    early = call(b"early", 5)
    conversation.take(early, 0)
    conversation.tick(PATIENCE_S)
    assert (said(conversation), conversation.mode) == ([b"early"], Mode.PLAIN)
    conversation.hear(YES, 2)
    later = call(b"later", 60)
    conversation.take(later, 2)
    conversation.tick(6)
    assert early.done()
    assert not conversation.must_reopen
    conversation.hear([later.correlation, b"", b"MDPC01", b"echo", b"done"], 7)
    assert later.result() == [b"done"]


def test_the_question_is_put_again_at_a_third_of_the_lease() -> None:
    for answer in (NO, YES):
        conversation = begun(answer)
        conversation.tick(TTL_S / 3 - 1)
        assert said(conversation) == []
        conversation.tick(TTL_S / 3)
        assert len(said(conversation)) == 1
        assert conversation.due_s == 2 * TTL_S / 3


def test_a_lost_connection_holds_everything_back_until_it_is_known_who_is_there() -> None:
    conversation = begun(YES)
    conversation.lose()
    conversation.take(call(), 1)
    conversation.tick(2)
    assert said(conversation) == []
    conversation.come(2.1)
    assert len(said(conversation)) == 1
    conversation.hear(NO, 2.2)
    assert conversation.out == [[b"", b"MDPC01", b"echo", b"x"]]


def test_there_is_an_end_to_how_many_calls_may_wait() -> None:
    conversation = begun(YES)
    for _ in range(MAX_CALLS):
        conversation.take(call(), 1)
    one_more = call()
    conversation.take(one_more, 1)
    refused = one_more.future.exception()
    assert isinstance(refused, CallFailed)
    assert refused.error == "TOO_MANY_CALLS"


def test_clocks_of_calls_that_were_answered_are_forgotten() -> None:
    conversation = begun(YES)
    for _ in range(3 * MAX_CALLS):
        one = call(timeout_s=3600)
        conversation.take(one, 1)
        conversation.hear([one.correlation, b"", b"MDPC01", b"echo", b"x"], 1)
        conversation.out.clear()
    assert len(conversation._deadlines) <= 2 * MAX_CALLS + 1


WORDS = st.sampled_from(
    [b"", b"MDPC01", b"MDPW01", b"\x02", b"\x04", b"\x05", b"\x08", b"\x09", b"echo", b"mmi.notify", b"200"]
)
SESSION_MAPS = st.dictionaries(
    st.text(max_size=3) | st.sampled_from(["final", "id", "job_id", "lease"]), st.integers() | st.text()
)


@given(st.lists(st.lists(WORDS | st.binary(max_size=8) | SESSION_MAPS.map(cbor2.dumps), max_size=6), max_size=8))
def test_whatever_a_broker_says_nothing_breaks_and_no_call_is_lost(messages: list[list[bytes]]) -> None:
    conversation = begun(YES)
    waiting = call()
    conversation.take(waiting, 0)
    for frames in messages:
        hear_as_client(frames)
        hear_as_worker(frames)
        conversation.hear(frames, 0)
    conversation.hear([waiting.correlation, b"", b"MDPC01", b"echo", b"done"], 0)
    assert waiting.result(0) == [b"done"]


def test_a_client_is_gone_when_its_connection_ends() -> None:
    lines = ClientConnections()
    lines.heard(b"a", 7)
    assert lines.settle({7}) == set()
    lines.ended(7)
    assert lines.settle(set()) == {b"a"}
    assert lines.settle(set()) == set()


def test_another_client_on_the_same_number_is_not_gone() -> None:
    lines = ClientConnections()
    lines.heard(b"a", 7)
    lines.settle({7})
    # In one round: the first ended, and the second was heard through the number of its connection.
    lines.heard(b"b", 7)
    lines.ended(7)
    assert lines.settle({7}) == {b"a"}
    lines.ended(7)
    assert lines.settle(set()) == {b"b"}


def test_a_client_that_comes_back_through_another_connection_is_there() -> None:
    lines = ClientConnections()
    lines.heard(b"a", 7)
    lines.settle({7})
    lines.heard(b"a", 8)
    lines.ended(7)
    assert lines.settle({8}) == set()
    lines.ended(7)
    assert lines.settle({8}) == set()
    lines.ended(8)
    assert lines.settle(set()) == {b"a"}


def test_who_said_something_and_went_in_the_same_round_is_gone() -> None:
    lines = ClientConnections()
    lines.heard(b"a", 7)
    lines.ended(7)
    assert lines.settle(set()) == {b"a"}


def test_where_the_connection_is_not_known_nobody_is_ever_gone() -> None:
    lines = ClientConnections()
    lines.heard(b"a", None)
    lines.ended(7)
    assert lines.settle(set()) == set()
