"""JSON of strangers is measured before it is built."""

import json
import timeit

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.support.decoding_bombs import PATIENCE, SIZE_BYTES, assert_bounded, cost_of, json_bombs

from unstuck.domain.bounded_json import LONG_DIGITS, MAX_LARGE_EXPONENTS, MAX_LONG_RUNS, check_json, decode_json
from unstuck.domain.bounds import MAX_DEPTH, BoundExceeded, Bounds, NotDecodable
from unstuck.http.auth.limits import LARGE_BYTES

BOUNDS = Bounds(SIZE_BYTES, setting="http.max_body_bytes")
TIGHT = '[]{}"\\,:e0 é'

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(TIGHT, max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(TIGHT, max_size=4), inner, max_size=3),
    max_leaves=20,
)


def depth_of(value: object) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth_of, inner), default=0)


@given(JSON, st.integers(0, 6), st.booleans())
@example({"": []}, 1, False)
@example([{"a": [{}]}], 3, False)
def test_depth_is_what_a_parser_would_find(value: object, limit: int, ascii_only: bool) -> None:
    data = json.dumps(value, ensure_ascii=ascii_only, allow_nan=False).encode()
    bounds = Bounds(1_000_000, depth=limit)
    if depth_of(value) > limit:
        with pytest.raises(BoundExceeded) as refused:
            decode_json(data, bounds)
        assert refused.value.exceeded == "depth"
    else:
        assert decode_json(data, bounds) == value


@given(st.binary(max_size=300) | st.text(TIGHT + "1.-+EuUntf\x00", max_size=300).map(str.encode))
@example(b'"\\ud800"')
@example(b"[NaN]")
@example(b"Infinity")
@example(b"1" * 4301)
@example(b"\xef\xbb\xbf{}")
@example(b'"\xed\xa0\x80"')
def test_bytes_are_read_as_the_library_reads_them_or_refused(data: bytes) -> None:
    try:
        expected = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        with pytest.raises((NotDecodable, BoundExceeded)):
            decode_json(data, BOUNDS)
    else:
        # Repr, since -0.0 and 0 are equal.
        assert repr(decode_json(data, BOUNDS)) == repr(expected)


@pytest.mark.parametrize("name", json_bombs())
def test_no_bomb_costs_more_than_half_a_second_or_100_mb(name: str) -> None:
    data = json_bombs()[name]()
    assert len(data) <= SIZE_BYTES + 2
    assert_bounded(lambda: decode_json(data, Bounds(SIZE_BYTES + 2)))


@pytest.mark.parametrize(
    ("data", "exceeded", "said"),
    [
        (b"[" + b"0" * 100 + b"]", "bytes", "The body has 102 bytes; at most 100 are allowed: send less"),
        (b"[" * 100, "depth", "The body is nested more than 64 deep"),
    ],
)
def test_a_refusal_names_the_bound_and_its_value(data: bytes, exceeded: str, said: str) -> None:
    with pytest.raises(BoundExceeded) as refused:
        decode_json(data, Bounds(100, setting="http.max_body_bytes"), "The body")
    assert refused.value.exceeded == exceeded
    assert str(refused.value).startswith(said)


def test_values_are_counted_with_their_keys_and_the_setting_is_named() -> None:
    pair = b'{"a":1},'
    bounds = Bounds(32 * 100_000, setting="http.max_body_bytes")
    assert len(decode_json(b"[" + pair * 33_000 + b"0]", bounds)) == 33_001
    with pytest.raises(BoundExceeded, match=r"more than 100,000 values, .*raise http\.max_body_bytes\.") as refused:
        decode_json(b"[" + pair * 34_000 + b"0]", bounds)
    assert refused.value.exceeded == "values"


def test_what_stands_in_a_string_does_not_count() -> None:
    text = "[{,:" * 500_000 + '\\"' + "5e-324," * 50_000
    assert decode_json(json.dumps([text, {text: text}]).encode(), BOUNDS) == [text, {text: text}]


def test_numbers_that_are_slow_to_read_are_counted() -> None:
    many = b",".join([b"1E+300"] * MAX_LARGE_EXPONENTS)
    assert len(decode_json(b"[" + many + b"]", BOUNDS)) == MAX_LARGE_EXPONENTS
    # A few more: one that is cut in two by the end of a chunk is not seen.
    with pytest.raises(BoundExceeded, match="2,000 numbers with exponents of three digits or more") as refused:
        decode_json(b"[" + many + b",5e-324" * 9 + b"]", BOUNDS)
    assert refused.value.exceeded == "numbers"


def test_a_short_body_is_read_in_a_moment() -> None:
    # The event loop reads it. With one of 70 kB it answered nothing else for 50 ms.
    for number in (b"5e-324", b"1.7976931348623157e308", b"9" * 4300):
        count = LARGE_BYTES // (len(number) + 1)
        for many in (count, count // 2, count // 8, count // 40):
            took_s = cost_of(lambda: decode_json(b"[" + b",".join([number] * many) + b"]", BOUNDS)).cpu_s  # noqa: B023
            assert took_s < 0.03 * PATIENCE


@pytest.mark.parametrize("number", [b"1.59751010534266529292e52", b"-0." + b"0" * 300 + b"7", b"9" * 4300])
def test_long_numbers_are_counted_by_their_digits(number: bytes) -> None:
    most = MAX_LONG_RUNS // (sum(48 <= byte <= 57 for byte in number) // LONG_DIGITS)
    fine = b"[" + b",".join([number] * (most - 10)) + b"]"
    assert len(decode_json(fine, BOUNDS)) == most - 10
    text = number.decode() * 500
    assert decode_json(b'["' + text.encode() + b'",' + fine + b"]", BOUNDS)[0] == text
    # Some more: those that are cut in two by the ends of chunks are not seen.
    with pytest.raises(BoundExceeded, match="long numbers with more than 2,000,000 digits together") as refused:
        decode_json(b"[" + b",".join([number] * (most + 200)) + b"]", Bounds(2 * 8 * 1024 * 1024))
    assert refused.value.exceeded == "numbers"


def test_of_a_key_that_comes_twice_the_last_counts() -> None:
    assert decode_json(b'{"a":1,"a":2}', BOUNDS) == {"a": 2}


def test_a_type_is_checked_too() -> None:
    assert decode_json(b"[1]", BOUNDS, type=list[int]) == [1]
    with pytest.raises(NotDecodable, match="Expected `int`, got `str`"):
        decode_json(b'["1"]', BOUNDS, type=list[int])


def test_deep_is_deeper_than_the_limit_only() -> None:
    check_json(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH, BOUNDS)
    with pytest.raises(BoundExceeded):
        check_json(b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), BOUNDS)


def test_measuring_a_small_body_takes_about_as_long_as_reading_it_at_most() -> None:
    body = b'{"task":"mail.send","args":[17,"hello"],"kwargs":{"to":"a@example.com"},"queue":"mail","priority":3}'
    check_s = min(timeit.repeat(lambda: check_json(body, BOUNDS), number=2_000, repeat=5))
    read_s = min(timeit.repeat(lambda: msgspec.json.decode(body), number=2_000, repeat=5))
    assert check_s < 5 * read_s
