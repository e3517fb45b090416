"""Every reader of foreign bytes is bounded: no input of 8 MB costs more than half a second or 100 MB."""

import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError
from tests import fuzz_decoders
from tests.mdp.fake_ledger import claimed
from tests.support import dashboard
from tests.support.decoding_bombs import SIZE_BYTES, assert_bounded, cbor_bombs, json_bombs
from tests.support.foreign_bytes import REDACT, REFUSALS, STORED, TEXTS

from unstuck.client import views
from unstuck.domain import frames, node_inputs
from unstuck.domain.bounds import TOO_MUCH
from unstuck.domain.frames import pack_frames, unpack_frames
from unstuck.domain.payload import JSON
from unstuck.domain.units import seconds
from unstuck.errors import ConfigError, PayloadError
from unstuck.http.operator_schemas import PruneBody
from unstuck.http.schemas import NewJobBody, NewJobsBody, NewWorkflowBody, RequestModel
from unstuck.http.workers.claims import _payload
from unstuck.ledger.contract.events import EventRecord
from unstuck.ledger.contract.jobs import JournalRecord, SignalRecord
from unstuck.remote.messages import Body

WORST_JSON = ["small objects", "rather slow floats", "rather many long integers", "objects and wide text"]
WORST_CBOR = ["long integers that collide as keys", "rather many long integers", "maps and wide text"]


@cache
def worst() -> list[bytes]:
    return [json_bombs()[name]() for name in WORST_JSON] + [cbor_bombs()[name]() for name in WORST_CBOR]


@pytest.mark.parametrize("reader", STORED)
def test_stored_bytes_are_read_within_bounds(reader: str) -> None:
    for bomb in worst():
        assert_bounded(lambda bomb=bomb: STORED[reader](bomb), REFUSALS)


def test_many_frames_share_the_bounds_of_their_message() -> None:
    # Each of them alone would be let through.
    frame = b"\x99\xff\xff" + b"\x80" * 65_535
    many = pack_frames([frame] * 120)
    assert_bounded(lambda: frames.read_reply(many, pack_frames([b"\xa0"])), REFUSALS)
    assert_bounded(lambda: frames.show_call(many), REFUSALS)
    long = b"\xdd" + (2_000_000).to_bytes(4) + b"\xc4\x02ab" * 2_000_000
    assert_bounded(lambda: unpack_frames(long), REFUSALS)
    with pytest.raises(PayloadError, match="2,000,000 packed frames; at most 65,535"):
        unpack_frames(long)


def test_a_refused_argument_says_why() -> None:
    with pytest.raises(PayloadError, match="a key that is not text"):
        frames.arguments(pack_frames([b"\xa1\x01\x02"]))
    with pytest.raises(PayloadError, match="more than 262,144 values"):
        frames.arguments(pack_frames([b'{"a":[' + b"0," * 300_000 + b"0]}"]))


def test_what_is_too_much_to_show_says_so() -> None:
    large = b"[" + b"0," * 150_000 + b"0]"
    assert views.value_view(large, JSON) == TOO_MUCH
    assert frames.show_call(pack_frames([large])) == ([TOO_MUCH], {})
    assert len(frames.read_reply(pack_frames([large]), pack_frames([b"x"]))) == 150_001


def test_the_journal_and_the_signals_of_a_job_share_the_bounds_of_what_is_shown() -> None:
    # Each of them alone would be shown.
    value = b"[" + b"1.5," * 90_000 + b"1.5]"
    entries = [JournalRecord(seq, "step", f"step {seq}", value, 0.0, 1) for seq in range(50)]
    signals = [SignalRecord(number, "go", value, 0.0, "me", None) for number in range(50)]
    small = JournalRecord(50, "step", "small", b'{"password":1,"a":[2]}', 0.0, 1)
    job = msgspec.structs.replace(dashboard.job(enqueued_at=0.0, finished_at=None), payload=b"{}")

    def show() -> views.View:
        events: list[EventRecord] = []
        return views.job_detail(job, [], events, {}, None, REDACT, journal=[*entries, small], signals=signals)

    assert_bounded(show)
    shown = show()
    assert len(shown["journal"][0]["value"]) == 90_001
    assert {one["value"] for one in shown["journal"][1:-1]} == {
        f"(too much to show; app.ledger.journal({job.id}) has it)"
    }
    assert {one["value"] for one in shown["signals"]} == {f"(too much to show; app.ledger.signals({job.id}) has it)"}
    assert shown["journal"][-1]["value"] == {"password": "•••", "a": [2]}


LONG = {
    "digits": "1" * SIZE_BYTES,
    "units": "1m" * (SIZE_BYTES // 2),
    "blanks": " " * SIZE_BYTES,
    "percents": "a=" + "%41" * (SIZE_BYTES // 3),
    "fields": "a&" * (SIZE_BYTES // 2),
    "dots": "1." * (SIZE_BYTES // 2),
    "commas": "1," * (SIZE_BYTES // 2),
    "brackets": "W1tb" * (SIZE_BYTES // 4),
    "letters": "\U0001f600" * (SIZE_BYTES // 4),
}


@pytest.mark.parametrize("reader", TEXTS)
def test_long_texts_are_read_within_bounds_and_not_repeated_in_errors(reader: str) -> None:
    def read_and_complain(text: str) -> None:
        complaint = ""
        try:
            TEXTS[reader](text)
        except ValidationError:
            # What the answer says of it is cut by the server.
            pass
        except REFUSALS as error:
            complaint = str(error)
        assert len(complaint) < 2_000

    for text in LONG.values():
        assert_bounded(lambda text=text: read_and_complain(text), ())


@settings(max_examples=100)
@given(st.text(max_size=60) | st.text("0123456789.-+_*/,smhdwe ", max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    for reader in TEXTS.values():
        try:
            reader(text)
        except (*REFUSALS, ValidationError):
            pass


@settings(max_examples=200)
@given(
    st.binary(max_size=80)
    | st.lists(st.sampled_from([b"{", b"[", b'"', b"\xa1", b"\x81", b"\x61a", b"1"])).map(b"".join)
)
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for reader in STORED.values():
        try:
            reader(data)
        except REFUSALS:
            pass


@pytest.mark.parametrize(
    "value", [10**400, -(10**400), float("inf"), float("nan"), 1e300, "1e999", "9" * 99, "1" * 98 + "w"]
)
def test_durations_that_no_clock_can_tell_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="must be between 0 and ten years"):
        seconds(value)


def test_a_remote_worker_gets_arguments_of_which_nothing_was_built() -> None:
    large = b'{"args":' + json_bombs()["empty arrays"]() + b',"kwargs":{"a":"b"}}'
    job = msgspec.structs.replace(claimed(1, "sum"), payload=large, payload_type=JSON)
    assert_bounded(lambda: msgspec.json.encode(_payload(job)), ())
    value, encoded = _payload(job)
    assert (msgspec.json.encode(value), encoded) == (large, None)
    part = node_inputs.Part(0, False, None, json_bombs()["empty arrays"]())
    node = b'{"refs":[[["args",0],0]],"args":[null]}'
    filled = msgspec.structs.replace(job, payload=node, inputs=node_inputs.pack_inputs([part]))
    assert_bounded(lambda: msgspec.json.encode(_payload(filled)), ())


def test_mutations_of_bombs_are_read_or_refused(seed: int) -> None:
    """A short form of `make fuzz-decoders`."""
    dice, decoders = random.Random(seed), fuzz_decoders.Decoders(None)
    known = fuzz_decoders.known_inputs(len(decoders.names))
    for _ in range(500):
        data = fuzz_decoders.mutate(dice, known)
        # None of them grown to 8 MB: the tests above do that.
        decoders.try_one(data[:1] + b"\x01" + data[2:])


def test_a_body_with_many_unknown_fields_is_one_mistake() -> None:
    many = {f"k{number}": 0 for number in range(130_000)}
    assert_bounded(lambda: NewJobBody.model_validate(many), (ValidationError,))
    with pytest.raises(ValidationError, match="it has 130,000 fields") as refused:
        NewJobBody.model_validate(many)
    assert refused.value.error_count() == 1


def _lists_in(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            yield schema
        for part in schema.values():
            yield from _lists_in(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            yield from _lists_in(part)


def _with_subclasses(kind: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield kind
    for inner in kind.__subclasses__():
        yield from _with_subclasses(inner)


def test_every_list_of_a_body_is_read_up_to_its_first_wrong_item() -> None:
    found = [
        (kind.__name__, one)
        for base in (RequestModel, Body)
        for kind in _with_subclasses(base)
        for one in _lists_in(kind.__pydantic_core_schema__)
    ]
    assert {"NewJobsBody", "NewNodeBody", "PruneBody", "Where", "SettleBody", "RegisterBody"} <= {
        name for name, _ in found
    }
    assert [name for name, one in found if not one.get("fail_fast")] == []


def test_a_list_of_wrong_items_is_one_mistake() -> None:
    # The errors of all of them were 400 MB, of a body of 500 kB.
    wrong = [0] * 250_000
    for check in (
        lambda: PruneBody.model_validate({"state": wrong}),
        lambda: NewWorkflowBody.model_validate({"name": "w", "nodes": [{"task": "a", "after": wrong}]}),
        lambda: NewJobsBody.model_validate({"jobs": [dict.fromkeys(map(str, range(90)), 0)] * 1_000}),
    ):
        assert_bounded(check, (ValidationError,))
        with pytest.raises(ValidationError) as refused:
            check()
        assert refused.value.error_count() <= 91
