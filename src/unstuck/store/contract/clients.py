"""What clients do: enqueue, wake the workers, ask how jobs ended."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Protocol

from unstuck.store.records import Enqueued, NewJob, OnceAnswer, Outcome, Request


class ClientVerbs(Protocol):
    def enqueue(self, jobs: Sequence[NewJob], patience_s: float = 10.0) -> list[Enqueued]:
        """Store jobs durably, all or none, in their order. Repeats itself safely where the commit was uncertain.

        Raise LedgerBusy if an open transaction holds a unique key of theirs for longer than `patience_s`."""
        ...

    def enqueue_once(self, request: Request, jobs: Sequence[NewJob]) -> OnceAnswer:
        """Store jobs, all or none, unless a request with this key did so before, also where those jobs have ended."""
        ...

    def enqueue_on(self, connection: Any, jobs: Sequence[NewJob]) -> list[Enqueued]:
        """Store jobs inside the caller's own transaction; nothing is committed here."""
        ...

    def ring(self, words: Iterable[str]) -> None:
        """Wake who listens: 'queue:NAME', 'worker:ID' (control), 'workers' (somebody was born or died).

        Best effort, outside any transaction, never raises for a bell that cannot be rung."""
        ...

    def outcomes(self, job_ids: Collection[int]) -> list[Outcome]:
        """Give those that are finished, of any state; the others are left out."""
        ...

    def missing(self, job_ids: Collection[int]) -> set[int]:
        """Give those that do not exist (never did, or were pruned)."""
        ...
