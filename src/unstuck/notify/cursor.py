"""A place in the stream of events that survives a reconnect.

On PostgreSQL an event's number is taken before its commit, so a lower number may appear after a higher one. A place is
therefore the highest number seen, and those below it that were missing: written "120", or "120.115.117". One that names
itself, "120.120", stands behind the end of a job whose life was followed.
"""

from dataclasses import dataclass

from unstuck.domain.errors import ConfigError

MAX_HOLES = 20
MAX_ID = 2**63 - 1


@dataclass(frozen=True)
class Cursor:
    at: int
    holes: frozenset[int] = frozenset()
    ended: bool = False
    """The job whose life was followed has ended, and its end was told."""

    def __str__(self) -> str:
        numbers = (self.at, self.at) if self.ended else (self.at, *sorted(self.holes)[-MAX_HOLES:])
        return ".".join(map(str, numbers))

    def is_behind(self, event_id: int) -> bool:
        """Say whether an event comes after this place."""
        return event_id > self.at or event_id in self.holes

    @property
    def lowest(self) -> int:
        """Everything up to here was seen."""
        return min(self.holes, default=self.at + 1) - 1


def read_cursor(text: str) -> Cursor:
    """Understand what `str` made, as a client sends it back."""
    parts = text.strip().split(".")
    if len(parts) > MAX_HOLES + 1 or not all(part.isascii() and part.isdigit() and len(part) < 20 for part in parts):
        raise ConfigError(f"{text[:80]!r} is no place in the stream of events: send back the id of the last event.")
    at, *holes = (int(part) for part in parts)
    if at > MAX_ID:
        raise ConfigError(f"{text[:80]!r} is no place in the stream of events: that is beyond every number.")
    return Cursor(at, frozenset(hole for hole in holes if hole < at), ended=holes == [at])
