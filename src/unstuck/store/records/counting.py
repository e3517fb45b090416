"""What is counted: jobs ended, deaths, how long things took; and the fleet at one glance."""

import msgspec


class Count(msgspec.Struct, frozen=True, gc=False):
    """An amount to add to a counter, or what a counter stands at."""

    name: str
    labels: str
    """JSON with sorted keys, as `unstuck.metrics.labels` writes it: the same labels are the same text."""
    value: float


class MinuteCount(msgspec.Struct, frozen=True, gc=False):
    minute: int
    """Since 1970, by the ledger's clock."""
    name: str
    labels: str
    value: float


class Fleet(msgspec.Struct, frozen=True):
    """All workers in a few numbers: what a scrape needs, however many there are."""

    workers: dict[str, int]
    """How many there are of each state; the dead and stopped until retention removes them."""
    late: int = 0
    """Living workers that missed two beats in a row."""
    silent_s: float = 0.0
    """The longest silence among the living."""
    unswept_s: float | None = None
    """Since the sweep ticket ran out; 0 while somebody has it, None when nobody ever took it."""
