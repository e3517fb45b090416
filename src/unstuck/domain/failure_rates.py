"""Decide from counts whether a task fails too often."""

from collections.abc import Iterable, Mapping

import msgspec

HOUR_S = 3600.0
DAY_S = 86_400.0
FEWEST_FAILED = 5
"""How many jobs of a task must have failed before its failure rate is worth a word."""


class Ends(msgspec.Struct, frozen=True):
    """How jobs of one task ended within a time."""

    failed: int = 0
    succeeded: int = 0

    @property
    def ended(self) -> int:
        return self.failed + self.succeeded

    @property
    def share(self) -> float:
        """The share that failed, from 0 to 1."""
        return self.failed / self.ended if self.ended else 0.0


class FailingTask(msgspec.Struct, frozen=True):
    task: str
    ends: Ends
    within_s: float
    """The time that was looked at."""

    def __str__(self) -> str:
        window = "hour" if self.within_s <= HOUR_S else "day"
        return (
            f"{self.ends.failed:,} of {self.ends.ended:,} jobs of task {self.task!r} failed in the last {window} "
            f"({percent(self.ends.share)})"
        )


def find_failing(hour: Mapping[str, Ends], day: Mapping[str, Ends], share: float) -> list[FailingTask]:
    """Return the tasks of which at least this share failed, the worst first.

    The last hour decides if enough happened in it. Else the last day does."""
    return sorted(_failing(hour, day, share), key=lambda one: (-one.ends.share, -one.ends.failed, one.task))


def _failing(hour: Mapping[str, Ends], day: Mapping[str, Ends], share: float) -> Iterable[FailingTask]:
    for task, whole in day.items():
        lately = hour.get(task, Ends())
        ends, within_s = (lately, HOUR_S) if lately.ended >= FEWEST_FAILED else (whole, DAY_S)
        if ends.failed >= FEWEST_FAILED and ends.share >= share:
            yield FailingTask(task, ends, within_s)


def percent(share: float) -> str:
    """Write a share; never 100 % or 0 % unless it is exactly that."""
    rounded = round(share * 100)
    if share < 1.0:
        rounded = min(rounded, 99)
    if share > 0.0:
        rounded = max(rounded, 1)
    return f"{rounded} %"
