"""What was counted, since ever and minute by minute."""

from collections.abc import Collection, Sequence
from typing import Protocol

from unstuck.store.records import Count, Fleet, MinuteCount


class CountingVerbs(Protocol):
    def count(self, totals: Sequence[Count], lately: Sequence[Count] = ()) -> None:
        """Add to what was counted since ever, and to what was counted in this minute, in one commit.

        No name and labels may be twice among `totals`, nor among `lately`. After an UncertainCommit it may have
        happened: who cannot bear to count twice must not repeat it."""
        ...

    def counters(self) -> list[Count]:
        """Give what was counted since ever."""
        ...

    def counter_series(self, names: Collection[str], since_minute: int) -> list[MinuteCount]:
        """Give what was counted minute by minute, oldest first; minutes in which nothing was are left out."""
        ...

    def counter_sums(self, name: str, since_minute: int) -> list[Count]:
        """Return what was counted under a name since a minute, added up by labels."""
        ...

    def sweep_counters(self, kept_minutes: int, limit: int) -> int:
        """Remove the rows of minutes longer ago; the totals stay."""
        ...

    def fleet(self) -> Fleet:
        """Give all workers in a few numbers; as cheap with ten thousand."""
        ...
