"""Check the names people give to queues, tasks and settings, and guess what they meant."""

import re
from collections.abc import Iterable
from difflib import get_close_matches

from unstuck.domain.errors import ConfigError

MAX_NAME_CHARS = 200
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/@+\-]*")


def checked_name(value: object, what: str) -> str:
    """Give the name back, or raise ConfigError that says which names are allowed."""
    if not isinstance(value, str) or len(value) > MAX_NAME_CHARS or not _NAME.fullmatch(value):
        raise ConfigError(
            f"{what} {value!r} is not a usable name. Use up to {MAX_NAME_CHARS} letters, digits "
            "and _ . : / @ + -, beginning with a letter, a digit or _."
        )
    return value


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """Give " Did you mean 'x'?" where something known is close, else an empty string."""
    close = get_close_matches(wrong, list(known), n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""


def printable(text: str, max_chars: int) -> str:
    """Return the text of somebody else in one line that is fit for people, and not longer than this."""
    plain = "".join(char if char.isprintable() else " " for char in text)
    return " ".join(plain.split())[:max_chars]
