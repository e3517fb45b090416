"""What time brings: due jobs, expiry, retention, repair. Records and protocol."""

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


class Repaired(msgspec.Struct, frozen=True):
    workflow_id: int
    what: str


class Maintenance(Protocol):
    """The chores that time brings. Processes share the rounds by tickets."""

    def take_ticket(self, name: str, ttl_s: float) -> bool:
        """Win the right to do one round. It expires by itself, so that no frozen process holds it."""
        ...

    def promote_due(self, limit: int) -> Promoted:
        """Make ready what was scheduled and is due."""
        ...

    def expire_due(self, limit: int) -> Expired:
        """Cancel jobs that were not begun in time."""
        ...

    def follow_clock(self, limit: int) -> float:
        """Return by how many seconds the ledger's clock was set back since the last call.

        Retries then wait for the rest of their backoff, not until the clock has caught up: up to `limit` of them, those
        due soonest. Where a caller named the time of a job, it stays. A running job that began in the future
        of the clock moves with it: its deadline must not wait."""
        ...

    def check_keys(self, after: str, limit: int) -> KeysChecked:
        """Check some concurrency keys: admit jobs that wait though a place is free, remove keys without jobs."""
        ...

    def repair_workflows(self, limit: int) -> list[Repaired]:
        """Find workflows in a state that should be impossible, repair them, and write an event for each."""
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

    def sweep_audit(self, older_than_s: float, limit: int) -> int:
        """Remove entries of the audit log that are older than given."""
        ...

    def sweep_counters(self, kept_minutes: int, limit: int) -> int:
        """Remove the rows of minutes longer ago; the totals stay."""
        ...

    def prune(self, older_than_s: float, states: Collection[str] = ()) -> int:
        """Remove finished jobs of these final states, or of all final states if none is named."""
        ...
