"""Queues, their limits, concurrency keys and tasks: records and protocol."""

from collections.abc import Mapping
from typing import Protocol

import msgspec

from unstuck.domain.limits import QueueLimit
from unstuck.ledger.contract.jobs import JobLinks
from unstuck.ledger.contract.maintenance import Expired, KeysChecked


class QueueRecord(msgspec.Struct, frozen=True):
    name: str
    paused: bool
    pending: int
    """Ready to run now."""
    scheduled: int
    """Pending with a time in the future."""
    claimed: int
    running: int
    oldest_pending_s: float | None
    workers: int
    """Living workers that serve it."""
    waiting: int = 0
    """Gave their slots back, and wait for a time or a signal."""
    blocked: int = 0
    """Pending, and as many jobs of their concurrency key are at work as may be."""


class KeyHolder(msgspec.Struct, frozen=True):
    """A job that has a place in a line."""

    job_id: int
    state: str
    queue: str


class KeyRecord(msgspec.Struct, frozen=True):
    key: str
    places: int
    pinned_by: str | None
    """The operator who chose the number; None: what was enqueued last did."""
    blocked: int
    """How many wait to be let in."""
    holders: tuple[KeyHolder, ...]


class QueueLimitRecord(msgspec.Struct, frozen=True):
    name: str
    limit: QueueLimit
    limited_by: str | None
    """The operator who chose it, also where they chose no limit; None: an app declared it."""
    held: int
    """In hand now."""
    room: int
    """So many may be taken now."""
    in_s: float | None
    """When the rate allows the next one, where that is what is missing."""


class OrderVerbs(Protocol):
    def concurrency_keys(self, key: str | None = None, limit: int = 100) -> list[KeyRecord]:
        """Give the lines in which somebody stands (or one of them), by their keys."""
        ...

    def limit_key(self, key: str, places: int | None, by: str) -> None:
        """Choose how many of a line may be at work at once; None: as its jobs say again."""
        ...

    def check_keys(self, after: str, limit: int) -> KeysChecked:
        """Look after some lines: let in who waits at a free place, close lines in which nobody stands."""
        ...

    def queue_limits(self) -> list[QueueLimitRecord]:
        """Give the queues that have a limit, or of which an operator said that they have none."""
        ...

    def declare_limits(self, limits: Mapping[str, QueueLimit]) -> None:
        """Write down what an app says of its queues; what an operator chose stands."""
        ...

    def limit_queue(self, queue: str, limit: QueueLimit, by: str) -> None:
        """Choose the limit of a queue, or that it has none, over what apps declare."""
        ...

    def unlimit_queue(self, queue: str, by: str) -> None:
        """Take back what an operator chose: apps decide again, from the next worker that starts."""
        ...

    def links(self, job_id: int) -> JobLinks | None: ...

    def expire_due(self, limit: int) -> Expired:
        """Cancel jobs that were not begun in time."""
        ...
