"""Hide secrets among arguments and results before anybody sees them."""

import inspect
import re
from collections.abc import Iterable
from typing import Any

from unstuck.domain.policy import Policy

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
MAX_NAME_CHARS = 1_000

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

    def call(self, args: Any, kwargs: Any, policy: Policy) -> tuple[Any, Any]:
        """Give the arguments of a call as they may be shown: by name, and by the places that its task names so."""
        if isinstance(args, list):
            args = [_hidden(value) if policy.hides_place(place) else value for place, value in enumerate(args)]
        return self(args), self(kwargs)

    def hides(self, name: str) -> bool:
        if len(name) > MAX_NAME_CHARS:
            # Nobody calls anything so: it is not worth searching.
            return True
        plain = _plain(name)
        return any(word in plain for word in self._words)

    def places(self, parameters: Iterable[inspect.Parameter]) -> tuple[tuple[int, ...], int | None]:
        """Give the places of positional arguments to hide, and from where on all the rest (`*tokens`), if at all."""
        places: list[int] = []
        for place, parameter in enumerate(parameters):
            if parameter.kind is parameter.VAR_POSITIONAL:
                return tuple(places), place if self.hides(parameter.name) else None
            if parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_KEYWORD):
                break
            if self.hides(parameter.name):
                places.append(place)
        return tuple(places), None


def _hidden(value: Any) -> Any:
    return value if value in (None, "") else HIDDEN


def _plain(name: str) -> str:
    return _NOISE.sub("", name.lower())
