"""Find out how deep a JSON text is nested, without parsing it, in time that grows with its length and no faster."""

import re
from itertools import accumulate

_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_STRING = re.compile(rb'"[^"]*"')
_DELETED = bytes(byte for byte in range(256) if byte not in b'"[]{}')
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
CHUNK = 64 * 1024
"""A bomb is found in the first of these."""


def is_deeper_than(limit: int, text: bytes) -> bool:
    """Say whether arrays and objects stand more than `limit` deep in each other.

    What is no JSON at all may count as deep: it would be refused anyway."""
    if text.count(b"[") + text.count(b"{") <= limit:
        return False
    brackets = _STRING.sub(b"", _ESCAPE.sub(b"", text).translate(None, _DELETED))
    # A bracket that opens is a step down, one that closes a step up (-1).
    steps = memoryview(brackets.translate(_STEPS, b'"')).cast("b")
    depth = 0
    for start in range(0, len(steps), CHUNK):
        chunk = steps[start : start + CHUNK]
        if max(accumulate(chunk, initial=depth)) > limit:
            return True
        depth += sum(chunk)
    return False
