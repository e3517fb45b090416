"""What a client says and when, without sockets and clocks."""

import cbor2
from hypothesis import given
from hypothesis import strategies as st

from unstuck.domain.errors import CallFailed, ReplyTimeout
from unstuck.mdp.calling import PendingCall
from unstuck.mdp.conversation import MAX_CALLS, PATIENCE_S, TTL_S, Conversation, Mode
from unstuck.mdp.hearing import hear_as_client, hear_as_worker

NO = [b"", b"MDPC01", b"mmi.notify", b"501"]
YES = [b"", b"MDPC01", b"mmi.notify", b"200", cbor2.dumps({"lease": 60})]


def call(body: bytes = b"x", timeout_s: float = 2.5) -> PendingCall:
    return PendingCall("echo", [body], timeout_s)


def said(conversation: Conversation) -> list[bytes]:
    """Give the last frame of each message since the last look."""
    out = [frames[-1] for frames in conversation.out]
    conversation.out.clear()
    return out


def begun(answer: list[bytes] | None = None) -> Conversation:
    conversation = Conversation()
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
MAPS = st.dictionaries(
    st.text(max_size=3) | st.sampled_from(["final", "id", "job_id", "lease"]), st.integers() | st.text()
)


@given(st.lists(st.lists(WORDS | st.binary(max_size=8) | MAPS.map(cbor2.dumps), max_size=6), max_size=8))
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
