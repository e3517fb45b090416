"""Find out how deep a JSON text is nested, without parsing it."""

import re

_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_STRING = re.compile(rb'"[^"]*"')
_KEPT = b'"[]{}'
_DELETED = bytes(byte for byte in range(256) if byte not in _KEPT)
_SAME = bytes.maketrans(b"[]{}", b"()()")


def is_deeper_than(limit: int, text: bytes) -> bool:
    """Say whether arrays and objects stand more than `limit` deep in each other, in a few passes at the speed of C.

    What is no JSON at all may count as deep: it would be refused anyway."""
    if text.count(b"[") + text.count(b"{") <= limit:
        return False
    brackets = _STRING.sub(b"", _ESCAPE.sub(b"", text).translate(None, _DELETED)).translate(_SAME)
    for _ in range(limit):
        if not brackets:
            return False
        # Innermost pairs first: each pass takes one level away.
        brackets = brackets.replace(b"()", b"")
    return bool(brackets)
