"""Make the text of others harmless on a terminal: control characters are shown, not obeyed."""

import re

_OBEYED = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 without tab and newline, DEL, C1: escape sequences begin with one of them
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # these change the direction of the text around them
    "\u2028\u2029\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"  # other lines, and characters that nobody sees
    "]"
)


def harmless(text: str) -> str:
    """Return the text with every character that a terminal would obey written as an escape, such as `\\x1b`."""
    if _OBEYED.search(text) is None:
        return text
    return _OBEYED.sub(_shown, text.replace("\r\n", "\n"))


def harmless_json(text: str) -> str:
    """Return the same JSON, equal in value, without characters that a terminal would obey."""
    return _OBEYED.sub(_escaped, text)


def _shown(found: "re.Match[str]") -> str:
    code = ord(found[0])
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _escaped(found: "re.Match[str]") -> str:
    units = found[0].encode("utf-16-be")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))
