"""Inputs that cost a decoder more than they weigh, and what one call of a decoder costs."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

SIZE_BYTES = 8 * 1024 * 1024
MAX_S = 0.5
MAX_BYTES = 100_000_000
PATIENCE = 2
"""The suite shares its machine, and CPU time grows when caches are shared."""


@dataclass(frozen=True)
class Cost:
    """What one call took: CPU time, and by how much this process grew at most."""

    cpu_s: float
    peak_bytes: int


def cost_of(call: Callable[[], object], errors: tuple[type[BaseException], ...] = (ValueError,)) -> Cost:
    """Measure a call that may fail with `errors`."""
    before_bytes = _memory("VmRSS")
    # The kernel forgets the highest size of this process so far.
    Path("/proc/self/clear_refs").write_text("5")
    began_s = time.process_time()
    result = None
    try:
        result = call()
    except errors:
        pass
    took = Cost(time.process_time() - began_s, _memory("VmHWM") - before_bytes)
    del result
    return took


def _memory(name: str) -> int:
    return 1024 * int(Path("/proc/self/status").read_text().partition(f"{name}:")[2].split()[0])


def assert_bounded(call: Callable[[], object], errors: tuple[type[BaseException], ...] = (ValueError,)) -> None:
    """Check the promise: no input of 8 MB costs more than half a second or 100 MB."""
    cost = cost_of(call, errors)
    assert cost.cpu_s < MAX_S * PATIENCE, cost
    assert cost.peak_bytes < MAX_BYTES, cost


def repeated(unit: bytes, before: bytes = b"[", after: bytes = b"]", between: bytes = b",") -> bytes:
    """Return as many of a unit as fit."""
    count = (SIZE_BYTES - len(before) - len(after)) // (len(unit) + len(between))
    return before + (unit + between) * (count - 1) + unit + after


def json_bombs() -> dict[str, Callable[[], bytes]]:
    """JSON, or nearly, of 8 MB: each made when asked for."""
    return {
        "empty arrays": lambda: repeated(b"[]"),
        "empty objects": lambda: repeated(b"{}"),
        "small objects": lambda: repeated(b'{"":0}'),
        "one key again and again": lambda: repeated(b'"a":0', b"{", b"}"),
        "many keys": lambda: b"{" + b",".join(b'"%d":0' % number for number in range(SIZE_BYTES // 12)) + b"}",
        "nested arrays": lambda: repeated(b"[" * 60 + b"]" * 60),
        "nested objects": lambda: repeated(b'{"":' * 60 + b"0" + b"}" * 60),
        "one-letter texts": lambda: repeated('"ā"'.encode()),
        "digits": lambda: repeated(b"0"),
        "slow floats": lambda: repeated(b"5e-324"),
        "slow floats spelt otherwise": lambda: repeated(b"1.7976931348623157E+0308"),
        "slow floats, many digits": lambda: repeated(b"1.2345678901234567890123456789e-300"),
        "rather slow floats": lambda: b"[" + b",".join([b"1.59751010534266529292e52"] * 99_000) + b"]",
        "more rather slow floats": lambda: b"[" + b",".join([b"1.59751010534266529292e52"] * 260_000) + b"]",
        "rather many long integers": lambda: b"[" + b",".join([b"9" * 4300] * 460) + b"]",
        "one long integer": lambda: b"1" * SIZE_BYTES,
        "one long float": lambda: b"0." + b"1" * (SIZE_BYTES - 2),
        "one long exponent": lambda: b"1e" + b"9" * (SIZE_BYTES - 2),
        "long integers": lambda: repeated(b"9" * 4300),
        "deep": lambda: b"[" * SIZE_BYTES,
        "deep objects": lambda: b'{"a":' * (SIZE_BYTES // 5),
        "quotes": lambda: b'"' * SIZE_BYTES,
        "spaces": lambda: b" " * SIZE_BYTES,
        "backslashes": lambda: b'"' + b"\\" * (SIZE_BYTES - 2) + b'"',
        "escaped quotes": lambda: b'"' + b'\\"' * (SIZE_BYTES // 2 - 1) + b'"',
        "escaped letters": lambda: b'"' + b"\\u00e9" * (SIZE_BYTES // 6 - 1) + b'"',
        "halves of surrogate pairs": lambda: repeated(b'"\\ud800"'),
        "wide text": lambda: b'"\xf0\x9f\x98\x80' + b"a" * (SIZE_BYTES - 6) + b'"',
        "not UTF-8": lambda: b'"' + b"\xff" * (SIZE_BYTES - 2) + b'"',
        "objects and wide text": _most_json,
        "UTF-16": lambda: ("[" * (SIZE_BYTES // 2 - 1)).encode("utf-16"),
    }


def _most_json() -> bytes:
    """As many objects as are let through, nested, and the rest of it text that takes four times its bytes."""
    objects = b",".join([b'{"":' * 60 + b'""' + b"}" * 60] * (260_000 // 121))
    return b"[" + objects + b',"\xf0\x9f\x98\x80' + b"a" * (SIZE_BYTES - len(objects) - 9) + b'"]'


def cbor_bombs() -> dict[str, Callable[[], bytes]]:
    """CBOR, or nearly, of at most 8 MB: each made when asked for."""
    return {
        "long integers that collide as keys": lambda: colliding_map(400_000),
        "integers that collide as keys": lambda: (
            b"\xba"
            + _four(900_000)
            + b"".join(b"\x1b" + ((number << 40) | 7).to_bytes(8) + b"\x00" for number in range(800_000))
        ),
        "arrays as keys": lambda: b"\xba" + _four(2_000_000) + b"\x82\x01\x02\x00" * 2_000_000,
        "a set of long integers that collide": lambda: (
            b"\xd9\x01\x02\x9a" + _four(500_000) + b"".join(_colliding(500_000))
        ),
        "references to one large array": lambda: b"\xd8\x1c\x9f" + b"\xd8\x1d\x00" * 2_700_000 + b"\xff",
        "a decimal fraction with a large exponent": lambda: b"\xc4\x82\x1b" + b"\x7f" * 8 + b"\x01",
        "one long integer": lambda: b"\xc2\x5a" + _four(SIZE_BYTES - 6) + b"\xff" * (SIZE_BYTES - 6),
        "long integers": lambda: long_integers(SIZE_BYTES // 1_789),
        "rather many long integers": lambda: long_integers(440),
        "empty arrays": lambda: b"\x9a" + _four(SIZE_BYTES - 5) + b"\x80" * (SIZE_BYTES - 5),
        "empty maps without a count": lambda: b"\x9f" + b"\xa0" * (SIZE_BYTES - 2) + b"\xff",
        "small maps": lambda: b"\x9f" + b"\xa1\x60\x00" * (SIZE_BYTES // 3 - 1) + b"\xff",
        "nested arrays": lambda: b"\x9f" + (b"\x81" * 60 + b"\x00") * (SIZE_BYTES // 61 - 1) + b"\xff",
        "deep": lambda: b"\x81" * SIZE_BYTES,
        "deep without counts": lambda: b"\x9f" * SIZE_BYTES,
        "deep maps": lambda: b"\xa1\x60" * (SIZE_BYTES // 2),
        "deep tags": lambda: b"\xc6" * SIZE_BYTES,
        "text in many parts": lambda: b"\x7f" + b"\x60" * (SIZE_BYTES - 2) + b"\xff",
        "bytes in many parts": lambda: b"\x5f" + b"\x41a" * (SIZE_BYTES // 2 - 2) + b"\xff",
        "an array that says it is very long": lambda: b"\x9b" + b"\x7f" + b"\xff" * 7,
        "a map that says it is very long": lambda: b"\xbb" + b"\x7f" + b"\xff" * 7,
        "text that says it is very long": lambda: b"\x7b" + b"\x7f" + b"\xff" * 7,
        "arrays that say they are long": lambda: b"\x9a\x00\x7f\xff\x00" * (SIZE_BYTES // 5),
        "simple values": lambda: b"\x9f" + b"\xf8\x40" * (SIZE_BYTES // 2 - 1) + b"\xff",
        "wide text": lambda: b"\x7a" + _four(SIZE_BYTES - 5) + b"\xf0\x9f\x98\x80" + b"a" * (SIZE_BYTES - 9),
        "maps and wide text": _most_cbor,
        "one key again and again": lambda: b"\xbf" + b"\x61a\x00" * (SIZE_BYTES // 3 - 1) + b"\xff",
        "breaks": lambda: b"\xff" * SIZE_BYTES,
        "nothing": lambda: b"",
    }


def _most_cbor() -> bytes:
    """As many maps as are let through, nested, and the rest of it text that takes four times its bytes."""
    maps = (b"\xa1\x60" * 60 + b"\x60") * (260_000 // 121)
    text = b"\xf0\x9f\x98\x80" + b"a" * (SIZE_BYTES - len(maps) - 11)
    return b"\x9f" + maps + b"\x7a" + _four(len(text)) + text + b"\xff"


def long_integers(count: int) -> bytes:
    """Return a CBOR map with so many of the longest integers that are taken."""
    return b"\xa1\x61a\x9f" + (b"\xc2\x59\x06\xf9" + b"\xff" * 1_785) * count + b"\xff"


def colliding_map(count: int) -> bytes:
    """Return a CBOR map with integers for keys that all have the same hash in Python: multiples of 2**61 - 1."""
    return b"\xba" + _four(count) + b"".join(key + b"\x00" for key in _colliding(count))


def _colliding(count: int) -> Iterator[bytes]:
    # As a long integer of CBOR: tag 2, and its bytes.
    return (b"\xc2\x4c" + (number * (2**61 - 1)).to_bytes(12) for number in range(1, count + 1))


def _four(number: int) -> bytes:
    return number.to_bytes(4)
