"""Queues, their limits, concurrency keys and tasks: records and protocol."""

from collections.abc import Collection, Mapping
from typing import Protocol

import msgspec

from unstuck.domain.limits import QueueLimit
from unstuck.ledger.contract.jobs import TaskRecord


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


class Queues(Protocol):
    """Read queues, pause and purge them, and choose limits for queues and concurrency keys."""

    def pause(self, queue: str | None, by: str) -> list[str]:
        """Stop handing out jobs of one queue, or of all. Return the queues that changed."""
        ...

    def resume(self, queue: str | None, by: str) -> list[str]: ...

    def purge(self, queue: str, by: str) -> int:
        """Cancel the pending jobs of a queue that have not started. Return how many.

        Spared are jobs that were tried before, and nodes of workflows of which something has begun."""
        ...

    def tasks(self) -> list[TaskRecord]: ...

    def unserved(self, wanted: Collection[tuple[str, str]]) -> set[tuple[str, str]]:
        """Give those pairs of queue and task that no worker would take now: none lives that serves the one and knows
        the other, or all that do are leaving or switched off."""
        ...

    def limits(self) -> list[QueueLimitRecord]:
        """Return the queues that have a limit, or of which an operator said that they have none."""
        ...

    def declare_limits(self, limits: Mapping[str, QueueLimit]) -> None:
        """Store the limits that an app declares. A limit that an operator chose stays."""
        ...

    def limit(self, queue: str, limit: QueueLimit, by: str) -> None:
        """Choose the limit of a queue, or that it has none, over what apps declare."""
        ...

    def unlimit(self, queue: str, by: str) -> None:
        """Remove the limit that an operator chose: apps decide again, from the next worker that starts."""
        ...

    def concurrency_keys(self, key: str | None = None, limit: int = 100) -> list[KeyRecord]:
        """Return the concurrency keys that have jobs (or one of them), in the order of keys."""
        ...

    def limit_key(self, key: str, places: int | None, by: str) -> None:
        """Choose how many jobs of a concurrency key may run at once; None: as its jobs say."""
        ...

    def list(self) -> list[QueueRecord]:
        """Every queue that has unfinished jobs, a living worker, a known task, or a pause."""
        ...
