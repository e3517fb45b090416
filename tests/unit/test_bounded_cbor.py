"""CBOR of strangers is walked before it is built."""

import math
import timeit
from decimal import Decimal

import cbor2
import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.support.decoding_bombs import SIZE_BYTES, assert_bounded, cbor_bombs, colliding_map, long_integers

from unstuck.domain.bounded_cbor import (
    MAX_INTEGER_BYTES,
    MAX_LONG_INTEGER_BYTES,
    SELF_DESCRIBED,
    check_cbor,
    decode_cbor,
    decode_cbor_fields,
)
from unstuck.domain.bounds import MAX_DEPTH, BoundExceeded, Bounds, NotDecodable
from unstuck.domain.frames import read_map

BOUNDS = Bounds(SIZE_BYTES, setting="mdp.max_message_bytes")
SIMPLE = (
    st.none()
    | st.booleans()
    | st.integers(-(2**200), 2**200)
    | st.floats(allow_nan=False)
    | st.text(max_size=40)
    | st.binary(max_size=40)
)
VALUES = st.recursive(
    SIMPLE,
    lambda inner: st.lists(inner, max_size=30) | st.dictionaries(st.text(max_size=4), inner, max_size=5),
    max_leaves=40,
)


@settings(max_examples=30)
@given(VALUES, st.booleans())
def test_plain_values_come_back_as_they_were(value: object, marked: bool) -> None:
    data = cbor2.dumps(value)
    assert decode_cbor(SELF_DESCRIBED + data if marked else data, BOUNDS) == value


@settings(max_examples=30)
@given(VALUES, st.integers(0, 6))
def test_depth_is_what_a_parser_would_find(value: object, limit: int) -> None:
    data, bounds = cbor2.dumps(value), Bounds(SIZE_BYTES, depth=limit)
    if depth_of(value) <= limit:
        check_cbor(data, bounds)
    else:
        with pytest.raises(BoundExceeded) as refused:
            check_cbor(data, bounds)
        assert refused.value.exceeded == "depth"


def depth_of(value: object) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth_of, inner), default=0)


HEADS = "00 18ff 1b00 20 5f 7f 6161 780162 80 81 9f a0 a1 bf ff c2 d9d9f7 f6 f900 42 1f fb 62fffe"
PIECES = st.sampled_from([bytes.fromhex(head) for head in HEADS.split()])


@given(st.lists(PIECES, max_size=12).map(b"".join) | st.binary(max_size=30))
@example(b"\x9f\xff")
@example(b"\xbf\x61a\xff")
@example(b"\x7f\x61a\x41b\xff")
@example(b"\x5f\x5f\xff\xff")
@example(b"\x81\xff")
def test_bytes_are_read_as_the_library_reads_them_or_refused(data: bytes) -> None:
    try:
        found = decode_cbor(data, BOUNDS)
    except (NotDecodable, BoundExceeded):
        return
    assert repr(found) == repr(cbor2.loads(data.removeprefix(SELF_DESCRIBED)))


@settings(max_examples=30)
@given(VALUES)
def test_what_is_plain_is_never_refused_if_it_comes_without_counts(value: object) -> None:
    if _has_nan(value):
        return
    assert decode_cbor(_endless(value), BOUNDS) == value


def _has_nan(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _endless(value: object) -> bytes:
    match value:
        case list():
            return b"\x9f" + b"".join(map(_endless, value)) + b"\xff"
        case dict():
            return b"\xbf" + b"".join(_endless(key) + _endless(one) for key, one in value.items()) + b"\xff"
        case str():
            return b"\x7f" + b"".join(map(cbor2.dumps, value)) + b"\xff"
    return cbor2.dumps(value)


@pytest.mark.parametrize("name", cbor_bombs())
def test_no_bomb_costs_more_than_half_a_second_or_100_mb(name: str) -> None:
    data = cbor_bombs()[name]()
    assert len(data) <= SIZE_BYTES
    assert_bounded(lambda: decode_cbor(data, BOUNDS))
    if name == "maps and wide text":
        assert len(decode_cbor(data, BOUNDS)) == 260_000 // 121 + 1


def test_a_map_whose_keys_collide_is_refused_before_it_is_built() -> None:
    assert read_map(colliding_map(400_000)) is None


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (cbor2.dumps({1: 2}), "has a map with a key that is not text, at byte 1: use text for keys"),
        (cbor2.dumps([{"a": {b"b": 2}}]), "has a map with a key that is not text, at byte 5"),
        (cbor2.dumps(10**5000), r"has a tag \(2\) that is not taken"),
        (b"\xc2\x00", r"has a tag \(2\) that is not taken"),
        (cbor2.dumps({2**70: 1}), "has a map with a key that is not text"),
        (cbor2.dumps({1, 2}), r"has a tag \(258\)"),
        (cbor2.dumps(Decimal("1.5")), r"has a tag \(4\)"),
        (cbor2.dumps([1, 2, 3])[:-1], "was cut short"),
        (cbor2.dumps("abc")[:-1], "was cut short"),
        (b"\x19\x01", "was cut short"),
        (b"", "was cut short"),
        (cbor2.dumps(1) + b"\x00", "ends after 1 of 2 bytes"),
        (b"\x1c", r"byte 0 \(0x1c\) begins nothing"),
        (b"\xff", r"byte 0 \(0xff\) begins nothing"),
        (b"\xbf\x61a\xff", "a map ends with a key that has no value"),
        (b"\x7f\x41a\xff", "a part of another kind"),
        (b"\x62\xff\xfe", "cannot be read"),
    ],
)
def test_a_refusal_says_what_and_where(data: bytes, said: str) -> None:
    with pytest.raises(NotDecodable, match=f"The frame.*{said}"):
        decode_cbor(data, BOUNDS, "The frame")


def test_bounds_are_named_with_their_values() -> None:
    with pytest.raises(BoundExceeded, match=r"nested more than 64 deep"):
        check_cbor(b"\x81" * (MAX_DEPTH + 1) + b"\x00", BOUNDS)
    check_cbor(b"\x81" * MAX_DEPTH + b"\x00", BOUNDS)
    with pytest.raises(BoundExceeded, match=r"more than 262,144 values.*raise mdp\.max_message_bytes\."):
        check_cbor(cbor2.dumps([0] * 262_144), BOUNDS)
    check_cbor(cbor2.dumps([0] * 262_143), BOUNDS)


def test_long_integers_are_counted_by_their_bytes() -> None:
    most = MAX_LONG_INTEGER_BYTES // MAX_INTEGER_BYTES
    assert len(decode_cbor(long_integers(most), BOUNDS)["a"]) == most
    with pytest.raises(BoundExceeded, match="long integers of more than 800,000 bytes together") as refused:
        decode_cbor(long_integers(most + 1), BOUNDS)
    assert refused.value.exceeded == "numbers"
    # Short ones are as good as any other number.
    assert len(decode_cbor(cbor2.dumps([2**190] * 100_000), BOUNDS)) == 100_000
    # What is let through can be written as JSON in time.
    assert_bounded(lambda: msgspec.json.encode(decode_cbor(long_integers(most), BOUNDS)), ())


class TestFields:
    @settings(max_examples=20)
    @given(st.dictionaries(st.text("ab", max_size=2) | st.text(min_size=24, max_size=300), VALUES, max_size=6))
    def test_wanted_entries_are_those_of_the_whole_map(self, value: dict[str, object]) -> None:
        names = {"", "a", "b", "ab", *(name for name in value if len(name) > 2)}
        wanted = {name: one for name, one in value.items() if name in names}
        for data in (cbor2.dumps(value), _endless(value), SELF_DESCRIBED + cbor2.dumps(value)):
            assert decode_cbor_fields(data, names, BOUNDS) == wanted

    def test_of_a_key_that_comes_twice_the_last_counts(self) -> None:
        data = b"\xa2\x61a\x01\x78\x01a\x02"
        assert decode_cbor_fields(data, {"a"}, BOUNDS) == decode_cbor(data, BOUNDS) == {"a": 2}

    @pytest.mark.parametrize("data", [b"", b"\x80", b"\xa1", b"\xa1\x01\x02", b'{"a": 1}', SELF_DESCRIBED])
    def test_anything_else_is_refused(self, data: bytes) -> None:
        with pytest.raises(NotDecodable):
            decode_cbor_fields(data, {"a"}, BOUNDS)

    def test_other_entries_may_be_of_any_kind_and_wanted_ones_may_not(self) -> None:
        data = cbor2.dumps({"a": Decimal("1.5"), "b": {1: {2, 3}}, "c": 4, "d": {1: 2}})
        assert decode_cbor_fields(data, {"c"}, BOUNDS) == {"c": 4}
        assert decode_cbor_fields(data, {"a", "c", "d"}, BOUNDS, lenient=True) == {"c": 4}
        with pytest.raises(NotDecodable, match="has a tag"):
            decode_cbor_fields(data, {"a"}, BOUNDS)

    def test_what_is_not_wanted_costs_no_memory(self) -> None:
        data = cbor2.dumps({"a": 7, "b": [{"c": "d"}] * 60_000})
        assert_bounded(lambda: decode_cbor_fields(data, {"a"}, BOUNDS))
        assert decode_cbor_fields(data, {"a"}, BOUNDS) == {"a": 7}


def test_walking_a_small_map_takes_as_long_as_some_lines_of_python() -> None:
    data = cbor2.dumps({"v": 1, "events": ["WORKER_DIED", "NO_WORKERS"], "ttl": 60, "id": b"x" * 16})
    took_s = min(timeit.repeat(lambda: check_cbor(data, BOUNDS), number=500, repeat=5)) / 500
    hundred_steps_s = min(timeit.repeat(lambda: [str(n) for n in range(100)], number=500, repeat=5)) / 500
    assert took_s < 10 * hundred_steps_s
