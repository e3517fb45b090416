"""Whatever a peer sends, the thread that owns the socket is not held up: it walks bytes and builds no objects."""

import cbor2
import pytest
from tests.mdp.fake_ledger import FakeLedger, broker
from tests.support.decoding_bombs import SIZE_BYTES, assert_bounded, cbor_bombs, json_bombs

from unstuck.domain.limits import KeyRule
from unstuck.domain.policy import Policy, encode_policy
from unstuck.ledger.contract.jobs import TaskRecord
from unstuck.mdp.broker.jobs import json_of, read_calls
from unstuck.mdp.protocol import Request

LISTENING = b"listens to notices"
OPTIONS = cbor2.dumps({"priority": 3})
WORST = [
    "long integers that collide as keys",
    "integers that collide as keys",
    "a set of long integers that collide",
    "references to one large array",
    "empty arrays",
    "small maps",
    "maps and wide text",
]


def wrapped(bomb: bytes) -> bytes:
    """Return a map that holds a bomb, as a broker looks at maps first."""
    return b"\xa2\x65JobID\x07\x61x" + bomb


@pytest.mark.parametrize("name", WORST)
def test_no_body_holds_up_the_broker(name: str) -> None:
    core, bomb = broker(), cbor_bombs()[name]()
    for body in ([bomb], [OPTIONS, wrapped(bomb)]):
        message = [b"", b"MDPC01", b"echo", *body]
        assert_bounded(lambda message=message: core.on_message(b"client", message, None, 0.0), ())


@pytest.mark.parametrize("name", WORST[:1])
def test_nothing_that_a_peer_says_of_itself_holds_up_the_broker(name: str) -> None:
    core, ledger = broker(), FakeLedger()
    bomb = wrapped(cbor_bombs()[name]())
    assert_bounded(lambda: core.on_message(LISTENING, [b"", b"MDPC01", b"mmi.notify", bomb], None, 0.0), ())
    assert_bounded(lambda: core.on_message(b"w", [b"", b"MDPW01", b"\x01", b"echo", b"", bomb], 3, 0.0), ())
    core.on_message(LISTENING, [b"", b"MDPC01", b"mmi.notify", cbor2.dumps({"v": 1})], None, 0.0)
    core.on_message(b"v", [b"", b"MDPW01", b"\x01", b"echo"], 4, 0.0)
    core.on_message(LISTENING, [b"tag", b"", b"MDPC01", b"echo", b"x"], None, 0.0)
    while (order := core.take_batch()) is not None:
        core.on_batch_done(ledger.do(order), 0.0)
    sent = [send for send in core.take_sends() if send.frames[2] == b"\x02"]
    for command in (b"\x06", b"\x07"):
        said = [b"", b"MDPW01", command, sent[0].frames[3], b"", bomb]
        assert_bounded(lambda said=said: core.on_message(sent[0].to, said, None, 0.0), ())
    assert_bounded(lambda: core.on_message(LISTENING, [b"", b"MDPC01", b"mmi.status", bomb], None, 0.0), ())


def test_what_the_broker_wants_to_know_is_found_beside_a_body_of_any_kind() -> None:
    task = TaskRecord("sum", "sum", encode_policy(Policy(order=KeyRule(key="of:{who}", parameters=("who", "rest")))))
    strange = {"JobID": "mine", "who": "me", "rest": {1: {2, 3}}}
    for body in ((cbor2.dumps(strange),), (OPTIONS, cbor2.dumps(strange)), (b'{"JobID":"mine","who":"me","rest":[]}',)):
        (call,) = read_calls(Request(b"sum", body), {"sum": task}, 3, "mdp")
        assert (call.own_id, call.job.priority) == ("mine", 3 if len(body) > 1 else 0)
        assert call.job.more is not None
        assert call.job.more.concurrency_key == "of:me"


def test_many_maps_in_one_message_are_looked_into_up_to_a_bound_that_they_share() -> None:
    # Each of them alone would be looked into.
    frame = b"\xa2\x65JobID\x07\x61a\x9a" + (250_000).to_bytes(4) + b"\x00" * 250_000
    body = (OPTIONS, *[frame] * (SIZE_BYTES // len(frame)))
    keyed = TaskRecord("sum", "sum", encode_policy(Policy(order=KeyRule(key="of:{JobID}", parameters=("JobID", "a")))))
    for tasks in ({}, {"sum": keyed}):
        assert_bounded(lambda tasks=tasks: read_calls(Request(b"sum", body), tasks, 3, "mdp"), ())
        calls = read_calls(Request(b"sum", body), tasks, 3, "mdp")
        assert [call.own_id for call in calls] == ["7"] * 3 + [None] * (len(calls) - 3)
        assert {call.job.priority for call in calls} == {3}
        lines = [None if call.job.more is None else call.job.more.concurrency_key for call in calls]
        assert lines == (["of:7"] * 3 + ["sum"] * (len(calls) - 3) if tasks else [None] * len(calls))


def test_a_map_that_is_too_large_to_look_into_is_still_a_call_of_its_own() -> None:
    large = cbor2.dumps({"JobID": "mine", "rest": [0] * 300_000})
    calls = read_calls(Request(b"echo", (OPTIONS, large, cbor2.dumps({"JobID": "other"}))), {}, 3, "mdp")
    assert [(call.own_id, call.job.priority) for call in calls] == [(None, 3), ("other", 3)]


@pytest.mark.parametrize("name", [WORST[0], WORST[-1], "long integers", "rather many long integers"])
def test_no_reply_to_a_job_in_json_holds_up_the_broker(name: str) -> None:
    bomb = cbor_bombs()[name]()
    assert_bounded(lambda: json_of([bomb]), ())


@pytest.mark.parametrize("name", ["small objects", "slow floats", "rather many long integers", "objects and wide text"])
def test_no_json_holds_up_the_broker(name: str) -> None:
    bomb = b'{"JobID":7,"x":' + json_bombs()[name]() + b"}"
    core = broker()
    assert_bounded(lambda: core.on_message(b"client", [b"", b"MDPC01", b"echo", bomb], None, 0.0), ())
    assert_bounded(lambda: json_of([bomb]), ())
