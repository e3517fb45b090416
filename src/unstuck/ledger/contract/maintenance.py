"""What time brings: due jobs, expiry, retention. Records and protocol."""

from collections.abc import Collection
from typing import Protocol

import msgspec


class Promoted(msgspec.Struct, frozen=True):
    count: int
    queues: frozenset[str]
    next_due_in_s: float | None


class Swept(msgspec.Struct, frozen=True):
    """What one batch of retention removed."""

    jobs: int = 0
    events: int = 0
    workers: int = 0
    keys: int = 0
    """Unique keys whose period is over."""
    more: bool = False
    """There may be more to remove at once."""
    took_s: float = 0.0
    """How long the batch kept others from the database."""

    @property
    def total(self) -> int:
        return self.jobs + self.events + self.workers + self.keys


class UpkeepVerbs(Protocol):
    def promote_due(self, limit: int) -> Promoted:
        """Make ready what was scheduled and is due."""
        ...

    def follow_clock(self, limit: int) -> float:
        """Return by how many seconds the ledger's clock was set back since the last call.

        Retries then wait for the rest of their backoff, not until the clock has caught up: up to `limit` of them, those
        due soonest. Where a caller named the time of a job, it stays. A running job that began in the future
        of the clock moves with it: its deadline must not wait."""
        ...

    def sweep_old(self, jobs_s: float, events_s: float, workers_s: float, limit: int) -> Swept:
        """Remove one short batch of finished jobs, events and dead or stopped workers (that hold nothing), by age.

        Of jobs up to `limit` are looked at, going on where the last batch stopped. Of the others up to `limit` are
        removed."""
        ...

    def sweep_kept(self, limit: int) -> Swept:
        """Remove one short batch, up to `limit` each, of ended jobs that were to be kept for a time of their own and of
        unique keys whose period is over."""
        ...

    def prune(self, older_than_s: float, states: Collection[str] = ()) -> int:
        """Remove finished jobs (of these final states; all of them where none is named)."""
        ...


class KeysChecked(msgspec.Struct, frozen=True):
    next_after: str | None
    """Where to go on; None: it was the end."""
    repaired: int
    removed: int
    queues: frozenset[str]


class Expired(msgspec.Struct, frozen=True):
    count: int
    queues: frozenset[str]
    """In which others became ready by it."""
    next_in_s: float | None
