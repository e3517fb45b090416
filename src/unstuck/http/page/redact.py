"""Hide secrets among arguments and results before anybody sees them."""

import re
from collections.abc import Iterable
from typing import Any

HIDDEN = "•••"
USUAL = (
    "password",
    "passwd",
    "passphrase",
    "secret",
    "token",
    "api_key",
    "authorization",
    "credential",
    "private_key",
    "card_number",
    "cvv",
)
MAX_DEPTH = 50

_NOISE = re.compile(r"[^a-z0-9]")


class Redactor:
    """Hides the values of whatever is called like one of these names; `apiKey` and `stripe_api_key` are `api_key`."""

    def __init__(self, names: Iterable[str]) -> None:
        self._words = tuple(dict.fromkeys(filter(None, map(_plain, (*USUAL, *names)))))

    def __call__(self, value: Any, depth: int = 0) -> Any:
        if depth > MAX_DEPTH:
            return HIDDEN
        if isinstance(value, dict):
            return {
                key: HIDDEN if self.hides(str(key)) and inner not in (None, "") else self(inner, depth + 1)
                for key, inner in value.items()
            }
        if isinstance(value, list):
            return [self(inner, depth + 1) for inner in value]
        return value

    def hides(self, name: str) -> bool:
        plain = _plain(name)
        return any(word in plain for word in self._words)


def _plain(name: str) -> str:
    return _NOISE.sub("", name.lower())
