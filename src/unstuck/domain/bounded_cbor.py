"""Decode CBOR of strangers: walked as bytes first, built only if it is within its bounds.

Refused: map keys that are not text (integers can be chosen so that all of them collide in one dict), tags (they stand
for sets, for fractions of any size, and for references to other parts), lengths that the bytes do not have, and bytes
behind the one value. Two tags are taken: the mark that says "this is CBOR" (55799) at the start, and integers of more
than 64 bits (2 and 3) as values, with as many digits as JSON may have. If a map has a key twice, the last one counts.
Whether text is UTF-8 shows when it is built.
"""

from collections.abc import Collection
from contextlib import suppress
from typing import Any

from unstuck.domain.bounds import BoundExceeded, Bounds, NotDecodable, check_size, too_deep, too_many_values
from unstuck.errors import PayloadError

SELF_DESCRIBED = b"\xd9\xd9\xf7"
MAX_INTEGER_BYTES = 1_785
"""About 4,300 digits, which Python writes and reads at most."""
SHORT_INTEGER_BYTES = 24
MAX_LONG_INTEGER_BYTES = 800_000
"""What all longer integers may have together, about two million digits as in JSON: to write one in base 10 takes a time
that grows with the square of its digits."""

_BYTES, _TEXT, _ARRAY, _MAP, _TAG = 2, 3, 4, 5, 6
_STRINGS, _CONTAINERS = (_BYTES, _TEXT), (_ARRAY, _MAP)
_BREAK = 0xFF
_INTEGERS = (2, 3)
_SHORT_BYTES = 64 * 1024
_PLAIN_DEPTH = 8
_SIZES = {24: 2, 25: 3, 26: 5, 27: 9}
_PLAIN = [0] * 256
"""How many bytes an item has, by its first one, if that says it all; else 0."""
for _first in range(256):
    _kind, _info = _first >> 5, _first & 31
    if _kind in (0, 1) or (_kind == 7 and _info not in (24, 31)):
        _PLAIN[_first] = 1 if _info < 24 else _SIZES.get(_info, 0)
    elif _kind in _STRINGS and _info < 24:
        _PLAIN[_first] = 1 + _info
_KEYS = [size if first >> 5 == _TEXT and size else 1 << 40 for first, size in enumerate(_PLAIN)]
"""The same of keys; anything else than a short text ends behind everything."""
_ENDLESS = 1 << 62
"""Items that are left in an array or a map that does not say how many it has; even, as keys and values are pairs."""


def decode_cbor(data: bytes, bounds: Bounds, what: str = "The CBOR") -> Any:
    """Return the one value that the bytes stand for. Raise BoundExceeded or NotDecodable if there is none to return."""
    check_cbor(data, bounds, what)
    return build_cbor(data, what)


def build_cbor(data: bytes, what: str = "The CBOR") -> Any:
    """Return the value that bytes stand for which `check_cbor` let pass."""
    try:
        import cbor2
    except ModuleNotFoundError as error:
        cure = "pip install 'unstuck[mdp]'"
        raise PayloadError(f"CBOR cannot be read without more packages: {cure}. ({error})") from None
    try:
        # Without the mark, for which the library would make everything immutable.
        return cbor2.loads(data[_start(data) :])
    except Exception as error:
        raise NotDecodable(f"{what} cannot be read: {error}.") from error


def decode_cbor_fields(
    data: bytes, names: Collection[str], bounds: Bounds, what: str = "The CBOR", *, lenient: bool = False
) -> dict[str, Any]:
    """Return the entries of a map whose keys are among `names`, without building any of the others.

    Those may be of any kind. A wanted one that is refused raises, or is left out if we are `lenient`."""
    return count_cbor_fields(data, names, bounds, what, lenient=lenient)[0]


def count_cbor_fields(
    data: bytes, names: Collection[str], bounds: Bounds, what: str = "The CBOR", *, lenient: bool = False
) -> tuple[dict[str, Any], int]:
    """Like `decode_cbor_fields`. Return how many values the map holds, too."""
    if not is_cbor_map(data):
        raise NotDecodable(f"{what} is not a map.")
    entries: list[int] = []
    count = _walk(data, bounds, what, entries)
    wanted = {name.encode(): name for name in names}
    ends = [*entries[2::2], len(data) - _is_endless(data)]
    found: dict[str, Any] = {}
    for key_at, value_at, end in zip(entries[::2], entries[1::2], ends, strict=False):
        if data[key_at] >> 5 != _TEXT:
            raise _bad_key(key_at, what)
        name = wanted.get(_text_at(data, key_at, value_at))
        if name is not None:
            found.pop(name, None)
            with suppress(*([NotDecodable] if lenient else [])):
                found[name] = decode_cbor(data[value_at:end], bounds, what)
    return found, count


def is_cbor_map(data: bytes) -> bool:
    """Return whether the bytes begin as a map does."""
    at = _start(data)
    return len(data) > at and data[at] >> 5 == _MAP


def check_cbor(data: bytes, bounds: Bounds, what: str = "The CBOR") -> None:
    """Raise BoundExceeded or NotDecodable unless these bytes are one CBOR value of a kind that we take."""
    is_short = len(data) <= _SHORT_BYTES and len(data) <= bounds.values and len(data) <= bounds.size_bytes
    if not (is_short and _is_plain(data, min(_PLAIN_DEPTH, bounds.depth))):
        _walk(data, bounds, what, None)


def count_cbor(data: bytes, bounds: Bounds, what: str = "The CBOR") -> int:
    """Like `check_cbor`. Return how many values these bytes hold."""
    return _walk(data, bounds, what, None)


def _is_plain(data: bytes, depth: int) -> bool:
    """Return whether a short message is of the plainest kind, which most are: then nothing can be wrong with it."""
    try:
        return _end_of_plain(data, _start(data), depth) == len(data)
    except IndexError:
        return False


def _end_of_plain(data: bytes, at: int, depth: int) -> int:
    """Return where an item ends that is nested at most so deep, or raise IndexError if it is not plain."""
    first = data[at]
    at += 1
    if 0xA0 <= first <= 0xB7 and depth:
        for _ in range(first - 0xA0):
            at += _KEYS[data[at]]
            size = _PLAIN[data[at]]
            at = at + size if size else _end_of_plain(data, at, depth - 1)
        return at
    if 0x80 <= first <= 0x97 and depth:
        for _ in range(first - 0x80):
            size = _PLAIN[data[at]]
            at = at + size if size else _end_of_plain(data, at, depth - 1)
        return at
    if first in (0x58, 0x78):
        return at + 1 + data[at]
    if size := _PLAIN[first]:
        return at - 1 + size
    raise IndexError


def _walk(data: bytes, bounds: Bounds, what: str, entries: list[int] | None) -> int:
    """Look at the head of each item in turn, and return how many there are.

    If `entries` is given, items may be of any kind, and it gets where each item of the outermost map begins."""
    end = len(data)
    check_size(end, bounds, what)
    strict = entries is None
    at = _start(data)
    values_left = bounds.values + 1
    # The items that are left in the innermost array or map, and those of all around it. Text and bytes may come in
    # parts, which are then items of their kind.
    left, in_map, parts, tagged = 1, False, 0, False
    long_left = MAX_LONG_INTEGER_BYTES
    outer: list[tuple[int, bool, int]] = []
    while True:
        while not left:
            if not outer:
                if at > end:
                    raise _cut_short(what)
                if at < end:
                    raise NotDecodable(f"{what} is not one CBOR value: it ends after {at:,} of {end:,} bytes.")
                return bounds.values + 1 - values_left
            left, in_map, parts = outer.pop()
        if at >= end:
            raise _cut_short(what)
        first = data[at]
        kind, size = first >> 5, first & 31
        if first == _BREAK and left > _ENDLESS >> 1 and not tagged:
            if in_map and left & 1:
                raise NotDecodable(f"{what} is not CBOR: a map ends with a key that has no value.")
            at += 1
            left = 0
            continue
        if parts and (kind != parts or size == 31):
            raise NotDecodable(f"{what} is not CBOR: text or bytes that come in parts have a part of another kind.")
        if strict:
            if in_map and kind != _TEXT and not left & 1:
                raise _bad_key(at, what)
        elif len(outer) == 1 and not tagged:
            entries.append(at)  # type: ignore[union-attr]
        values_left -= 1
        if values_left <= 0:
            raise too_many_values(bounds, what)
        left -= 1
        at += 1
        tagged = False
        if size > 23:
            if size < 28:
                width = 1 << (size - 24)
                size = int.from_bytes(data[at : at + width])
                at += width
            elif size == 31 and _BYTES <= kind <= _MAP:
                if kind >= _ARRAY and len(outer) >= bounds.depth:
                    raise too_deep(bounds, what)
                outer.append((left, in_map, parts))
                left, in_map, parts = _ENDLESS, kind == _MAP, kind if kind < _ARRAY else 0
                continue
            else:
                raise NotDecodable(f"{what} is not CBOR: byte {at - 1:,} ({first:#04x}) begins nothing.")
        if kind in _STRINGS:
            at += size
        elif kind in _CONTAINERS:
            count = size if kind == _ARRAY else 2 * size
            if count > end - at:
                raise _cut_short(what)
            if len(outer) >= bounds.depth:
                raise too_deep(bounds, what)
            outer.append((left, in_map, parts))
            left, in_map, parts = count, kind == _MAP, 0
        elif kind == _TAG:
            if strict:
                integer_bytes = _integer_bytes(data, at) if size in _INTEGERS else MAX_INTEGER_BYTES + 1
                if integer_bytes > MAX_INTEGER_BYTES:
                    raise NotDecodable(f"{what} has a tag ({size}) that is not taken: send plain values.")
                if integer_bytes > SHORT_INTEGER_BYTES:
                    long_left -= integer_bytes
                    if long_left < 0:
                        raise BoundExceeded(
                            "numbers",
                            f"{what} holds long integers of more than {MAX_LONG_INTEGER_BYTES:,} bytes together: send "
                            "them as text, or in several messages.",
                        )
            # The next item takes its place.
            left += 1
            tagged = True


def _integer_bytes(data: bytes, at: int) -> int:
    """Return how many bytes follow, or more than an integer may have if it is anything else that follows."""
    head = data[at : at + 3]
    if not head or head[0] >> 5 != _BYTES:
        return MAX_INTEGER_BYTES + 1
    size = head[0] & 31
    if size < 24:
        return size
    if size == 24:
        return int.from_bytes(head[1:2])
    return int.from_bytes(head[1:]) if size == 25 else MAX_INTEGER_BYTES + 1


def _start(data: bytes) -> int:
    return len(SELF_DESCRIBED) if data.startswith(SELF_DESCRIBED) else 0


def _is_endless(data: bytes) -> bool:
    return data[_start(data)] & 31 == 31


def _text_at(data: bytes, at: int, end: int) -> bytes:
    size = data[at] & 31
    if size == 31:
        return str(build_cbor(data[at:end], "A key")).encode()
    return data[at + 1 + (0 if size < 24 else 1 << (size - 24)) : end]


def _bad_key(at: int, what: str) -> NotDecodable:
    return NotDecodable(f"{what} has a map with a key that is not text, at byte {at:,}: use text for keys.")


def _cut_short(what: str) -> NotDecodable:
    return NotDecodable(f"{what} is not CBOR, or was cut short: something in it is longer than all that came.")
