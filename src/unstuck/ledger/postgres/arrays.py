"""Write PostgreSQL arrays in their binary form at once, not element by element.

A turn carries hundreds of ids and results; the driver's own list adaptation costs more than the rest of the
turn. These functions give bytes that the driver passes on as they are.
"""

import struct
from collections.abc import Sequence
from typing import Any

import msgspec
from psycopg.adapt import AdaptersMap, Dumper
from psycopg.pq import Format

from unstuck.ledger.postgres import errors

_HEADER = struct.Struct(">iiIii")
_LENGTH = struct.Struct(">i")
_NULL = _LENGTH.pack(-1)

BOOL, BYTEA, INT8, INT4, TEXT, FLOAT8, JSONB = 16, 17, 20, 23, 25, 701, 3802
JSONB_VERSION = b"\x01"


class Array(bytes):
    __slots__ = ()


class BoolArray(Array):
    __slots__ = ()


class ByteaArray(Array):
    __slots__ = ()


class Int8Array(Array):
    __slots__ = ()


class Int4Array(Array):
    __slots__ = ()


class TextArray(Array):
    __slots__ = ()


class Float8Array(Array):
    __slots__ = ()


class JsonbArray(Array):
    __slots__ = ()


_ARRAY_OIDS: dict[type[Array], int] = {
    BoolArray: 1000,
    ByteaArray: 1001,
    Int8Array: 1016,
    Int4Array: 1007,
    TextArray: 1009,
    Float8Array: 1022,
    JsonbArray: 3807,
}


def int8s(values: Sequence[int]) -> Int8Array:
    return Int8Array(_fixed(INT8, "q", 8, values))


def int4s(values: Sequence[int]) -> Int4Array:
    return Int4Array(_fixed(INT4, "i", 4, values))


def byteas(values: Sequence[bytes | None]) -> ByteaArray:
    return ByteaArray(_variable(BYTEA, values))


def texts(values: Sequence[str | None]) -> TextArray:
    try:
        return TextArray(_variable(TEXT, [None if value is None else value.encode() for value in values]))
    except UnicodeEncodeError as error:
        raise errors.unwritable_text(error) from None


def float8s(values: Sequence[float | None]) -> Float8Array:
    pack = struct.Struct(">d").pack
    return Float8Array(_variable(FLOAT8, [None if value is None else pack(value) for value in values]))


def bools(values: Sequence[bool | None]) -> BoolArray:
    return BoolArray(_variable(BOOL, [None if value is None else bytes((value,)) for value in values]))


def jsonbs(values: Sequence[object | None]) -> JsonbArray:
    try:
        encoded = [None if value is None else JSONB_VERSION + msgspec.json.encode(value) for value in values]
    except UnicodeEncodeError as error:
        raise errors.unwritable_text(error) from None
    return JsonbArray(_variable(JSONB, encoded))


def oid_of(array: Array) -> int:
    """Say of what type an array is, to who sends it without the driver."""
    return _ARRAY_OIDS[type(array)]


def teach(adapters: AdaptersMap) -> None:
    """Let a connection or cursor accept these arrays as parameters."""
    for dumper in _DUMPERS:
        adapters.register_dumper(dumper.kind, dumper)


def _fixed(oid: int, code: str, size: int, values: Sequence[int]) -> bytes:
    count = len(values)
    # Each element is preceded by its length: lengths and values are laid out alternately and packed in one call.
    flat: list[int] = [size] * (2 * count)
    flat[1::2] = values
    return _header(oid, count, False) + struct.pack(f">{'i' + code if count else ''}" + f"i{code}" * (count - 1), *flat)


def _variable(oid: int, values: Sequence[bytes | None]) -> bytes:
    pack = _LENGTH.pack
    parts: list[bytes] = [_header(oid, len(values), None in values)]
    for value in values:
        if value is None:
            parts.append(_NULL)
        else:
            parts.append(pack(len(value)))
            parts.append(value)
    return b"".join(parts)


def _header(oid: int, count: int, nulls: bool) -> bytes:
    if count == 0:
        return struct.pack(">iiI", 0, 0, oid)
    return _HEADER.pack(1, int(nulls), oid, count, 1)


class _ArrayDumper(Dumper):
    kind: type[Array]
    format = Format.BINARY

    def dump(self, obj: Any) -> bytes:
        return obj  # type: ignore[no-any-return]


def _dumper(kind: type[Array], oid: int) -> type[_ArrayDumper]:
    return type(f"{kind.__name__}Dumper", (_ArrayDumper,), {"kind": kind, "oid": oid})


_DUMPERS = tuple(_dumper(kind, oid) for kind, oid in _ARRAY_OIDS.items())
