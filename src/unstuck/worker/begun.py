"""Remember which attempts a runner had, even after we let go of them: those are never given back for free."""

MAX_KEPT = 20_000
"""Older ones are forgotten. A failover takes seconds, and a busy worker ends a few thousand jobs in that time."""


class Begun:
    def __init__(self) -> None:
        self._tokens: dict[int, None] = {}

    def add(self, token: int) -> None:
        """Note that a runner got this attempt: its code may have begun."""
        self._tokens[token] = None
        if len(self._tokens) > MAX_KEPT:
            del self._tokens[next(iter(self._tokens))]

    def discard(self, token: int) -> None:
        """Note that it came back, and its code never began."""
        self._tokens.pop(token, None)

    def __contains__(self, token: int) -> bool:
        return token in self._tokens
