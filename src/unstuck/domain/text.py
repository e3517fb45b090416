"""Check the names people give to queues, tasks and settings, and guess what they meant."""

import re
from collections.abc import Iterable
from dataclasses import fields
from difflib import get_close_matches
from functools import wraps
from typing import Any, TypeVar

from unstuck.errors import ConfigError

T = TypeVar("T")

MAX_NAME_CHARS = 200
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/@+\-]*")


def checked_name(value: object, what: str) -> str:
    """Give the name back, or raise ConfigError that says which names are allowed."""
    if not isinstance(value, str) or len(value) > MAX_NAME_CHARS or not _NAME.fullmatch(value):
        raise ConfigError(
            f"{what} {value!r:.80} is not a usable name. Use up to {MAX_NAME_CHARS} letters, digits "
            "and _ . : / @ + -, beginning with a letter, a digit or _."
        )
    return value


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """Give " Did you mean 'x'?" where something known is close, else an empty string."""
    if len(wrong) > MAX_NAME_CHARS:
        # Comparing it with every name would take long, and it is close to none of them.
        return ""
    close = get_close_matches(wrong, list(known), n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""


def check_names(given: Iterable[str], known: Iterable[str], what: str) -> None:
    """Raise ConfigError for the first given name that is not known, with the one that was probably meant."""
    known = tuple(known)
    for name in given:
        if name not in known:
            raise ConfigError(f"There is no {what} {name!r}.{did_you_mean(name, known)} Known: {', '.join(known)}.")


def settings_class(kind: type[T]) -> type[T]:
    """Let a dataclass of settings name what was probably meant by a misspelt setting.

    Python's own TypeError names neither the class nor the setting that it knows."""
    known = tuple(item.name for item in fields(kind))  # type: ignore[arg-type]
    plain: Any = kind.__init__

    @wraps(plain)
    def checked(self: T, *values: Any, **given: Any) -> None:
        check_names(given, known, f"{kind.__name__} setting")
        plain(self, *values, **given)

    kind.__init__ = checked  # type: ignore[assignment, method-assign]
    return kind


def one_line(text: str, max_chars: int) -> str:
    """Return the text of somebody else in one line that is fit for people, and not longer than this."""
    plain = "".join(char if char.isprintable() else " " for char in text[: 4 * max_chars])
    return " ".join(plain.split())[:max_chars]
