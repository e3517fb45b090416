"""Decode JSON of strangers: measured first in a few passes over its bytes, built only if it is within its bounds.

Strict: no NaN, no Infinity, no half of a surrogate pair, valid UTF-8, integers of at most 4,300 digits. If an object
has a key twice, the last one counts, as in Python and in browsers.
"""

from collections.abc import Collection
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar, overload

import msgspec

from unstuck.domain.bounds import BoundExceeded, Bounds, NotDecodable, check_size, too_deep, too_many_values

T = TypeVar("T")

MAX_LARGE_EXPONENTS = 2_000
"""Numbers with an exponent of three or more digits: each takes a hundred times as long to read as any other. So many of
them take 15 ms, also in a short body, which is read in the event loop."""
LONG_DIGITS = 20
"""A number with so many digits is long. Reading one takes several times as long as reading a short one, and for
integers the time grows with the square of their digits, as does the time to write them again."""
MAX_LONG_RUNS = 100_000
"""How many times so many digits the long numbers of a message may have together. Reading and writing them takes about a
tenth of a second, in which nothing else runs in the process."""

_CHUNK_BYTES = 64 * 1024
_SHORT_BYTES = 4 * MAX_LARGE_EXPONENTS
"""Fewer bytes than this cannot hold that many, and no long numbers to speak of."""
_NUMBERS = bytes.maketrans(b"123456789E", b"000000000e")
_LARGE_EXPONENT = b"0e000"
_LONG_RUN = b"0" * LONG_DIGITS
_ONE_KIND = bytes.maketrans(b"[]", b"{}")
_ALL_BUT_MARKS = bytes(byte for byte in range(256) if byte not in b'"[]{}')
_ALL_BUT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")


@overload
def decode_json(data: bytes, bounds: Bounds, what: str = ..., *, type: type[T]) -> T: ...
@overload
def decode_json(data: bytes, bounds: Bounds, what: str = ...) -> Any: ...
def decode_json(data: bytes, bounds: Bounds, what: str = "The JSON", *, type: Any = Any) -> Any:
    """Return the value that the bytes stand for. Raise BoundExceeded or NotDecodable if there is none to return."""
    check_json(data, bounds, what)
    return build_json(data, what, type)


def build_json(data: bytes, what: str = "The JSON", type: Any = Any) -> Any:
    """Return the value that bytes stand for which `check_json` let pass."""
    try:
        return _decoder(type).decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise NotDecodable(f"{what} cannot be read: {error}.") from error


def decode_json_fields(data: bytes, names: Collection[str], bounds: Bounds, what: str = "The JSON") -> dict[str, Any]:
    """Return the entries of an object whose keys are among `names`, without building any of the others."""
    raw = decode_json(data, bounds, what, type=dict[str, msgspec.Raw])
    return {name: decode_json(bytes(raw[name]), bounds, what) for name in names if name in raw}


@lru_cache(64)
def _decoder(type: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(type)


def check_json(data: bytes, bounds: Bounds, what: str = "The JSON") -> None:
    """Raise BoundExceeded if these bytes would be too many, too many values, or too deep.

    It does not say whether they are JSON. Bytes that are not may count as too many or too deep."""
    size_bytes = len(data)
    opened = data.count(b"[") + data.count(b"{")
    # A value takes at least a byte, and a large exponent several: most bodies are too short to hold too many.
    if size_bytes <= _SHORT_BYTES and size_bytes <= bounds.values and size_bytes <= bounds.size_bytes:
        if opened <= bounds.depth or _is_flat(data, bounds.depth):
            return
    else:
        check_size(size_bytes, bounds, what)
        few = opened + data.count(b",") + data.count(b":") <= bounds.values
        if few and _Slow.of(data).is_within_bounds and _is_flat(data, bounds.depth):
            return
    _Measure(bounds, what).take(data)


def count_json(data: bytes, bounds: Bounds, what: str = "The JSON") -> int:
    """Like `check_json`. Return how many values these bytes hold."""
    check_size(len(data), bounds, what)
    return _Measure(bounds, what).take(data)


def _is_flat(data: bytes, depth: int) -> bool:
    """Return whether a text is nested at most so deep; False also if that cannot be told quickly."""
    # Both kinds of brackets become one, so that one pass removes one level.
    marks = _without_escapes(data).translate(_ONE_KIND, _ALL_BUT_MARKS).replace(b'""', b"")
    if b'"' in marks:
        # Some string has brackets in it.
        return False
    for _ in range(depth):
        if not marks:
            return True
        # Whatever is innermost goes.
        marks = marks.replace(b"{}", b"")
    return not marks


def _without_escapes(data: bytes) -> bytes:
    # Pairs of backslashes first: what is left before a quote escapes it.
    return data.replace(rb"\\", b"").replace(rb"\"", b"") if b"\\" in data else data


class _Slow(NamedTuple):
    """Counts of what takes long to read in numbers."""

    large_exponents: int = 0
    long_runs: int = 0

    @classmethod
    def of(cls, data: bytes) -> "_Slow":
        plain = data.translate(_NUMBERS, b"+-.")
        return cls(plain.count(_LARGE_EXPONENT), plain.count(_LONG_RUN))

    def plus(self, more: "_Slow") -> "_Slow":
        return _Slow(self.large_exponents + more.large_exponents, self.long_runs + more.long_runs)

    @property
    def is_within_bounds(self) -> bool:
        return self.large_exponents <= MAX_LARGE_EXPONENTS and self.long_runs <= MAX_LONG_RUNS

    def check(self, what: str) -> None:
        """Raise BoundExceeded if this is too much."""
        if self.large_exponents > MAX_LARGE_EXPONENTS:
            which = f"more than {MAX_LARGE_EXPONENTS:,} numbers with exponents of three digits or more"
        elif self.long_runs > MAX_LONG_RUNS:
            which = f"long numbers with more than {MAX_LONG_RUNS * LONG_DIGITS:,} digits together"
        else:
            return
        raise BoundExceeded("numbers", f"{what} holds {which}: send them as text, or in several messages.")


class _Measure:
    """What stands outside the strings of a text, counted chunk by chunk."""

    def __init__(self, bounds: Bounds, what: str) -> None:
        self._bounds = bounds
        self._what = what
        self._values = 0
        self._slow = _Slow()
        self._depth = 0

    def take(self, data: bytes) -> int:
        text = _without_escapes(data)
        if text.count(b'"') > 2 * (self._bounds.values + 1):
            raise too_many_values(self._bounds, self._what)
        inside = False
        for start in range(0, len(text), _CHUNK_BYTES):
            parts = text[start : start + _CHUNK_BYTES].split(b'"')
            # A space takes the place of each string: what stands on both sides of it is not one number.
            self._count(b" ".join(parts[inside::2]))
            inside ^= not len(parts) & 1
        return self._values

    def _count(self, outside: bytes) -> None:
        # Every value but the first, and every key, comes right after one of these.
        opened = outside.count(b"[") + outside.count(b"{")
        self._values += opened + outside.count(b",") + outside.count(b":")
        if self._values > self._bounds.values:
            raise too_many_values(self._bounds, self._what)
        self._slow = self._slow.plus(_Slow.of(outside))
        self._slow.check(self._what)
        # A bracket that opens is a step down (1), one that closes a step up (-1).
        steps = memoryview(outside.translate(_STEPS, _ALL_BUT_BRACKETS)).cast("b")
        if opened and max(accumulate(steps, initial=self._depth)) > self._bounds.depth:
            raise too_deep(self._bounds, self._what)
        self._depth += sum(steps)
