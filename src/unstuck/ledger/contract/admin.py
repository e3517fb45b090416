"""API tokens, the audit log and counters: records and protocol."""

from collections.abc import Collection, Sequence
from typing import Protocol

import msgspec


class NewApiToken(msgspec.Struct, frozen=True):
    """A token as it is written down: what can be checked against it, never the token itself."""

    id: str
    name: str
    hash: bytes
    seal: bytes
    """Signs the logins that were made with it; worth nothing without what only the token's holder has."""
    scopes: tuple[str, ...]
    created_by: str
    expires_in_s: float | None = None


class ApiTokenRecord(msgspec.Struct, frozen=True):
    id: str
    name: str
    hash: bytes
    seal: bytes
    scopes: tuple[str, ...]
    created_at: float
    created_by: str
    expires_at: float | None
    revoked_at: float | None
    valid: bool
    """Neither revoked nor expired, by the ledger's own clock."""


class AuditRecord(msgspec.Struct, frozen=True):
    id: int
    at: float
    by: str
    via: str
    verb: str
    target: str
    outcome: str | None
    """None: it was begun, and nobody knows how it ended."""


class Count(msgspec.Struct, frozen=True, gc=False):
    """An amount to add to a counter, or what a counter stands at."""

    name: str
    labels: str
    """JSON with sorted keys, as `unstuck.metrics.counters` writes it: the same labels are the same text."""
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


class AccessVerbs(Protocol):
    def add_api_token(self, token: NewApiToken) -> None:
        """Write a token of the web door down; its id must be new."""
        ...

    def api_tokens(self) -> list[ApiTokenRecord]:
        """Give every token there ever was, oldest first: also those that are revoked or have expired."""
        ...

    def revoke_api_token(self, token_id: str) -> bool:
        """End a token for good; False where there is none that still stands."""
        ...

    def begin_audit(self, by: str, via: str, verb: str, target: str) -> int:
        """Write down what an operator is about to do, before it is done; gives the number of the note."""
        ...

    def end_audit(self, audit_id: int, outcome: str) -> None:
        """Add how it ended."""
        ...

    def audit(self, before_id: int | None = None, limit: int = 100) -> list[AuditRecord]:
        """Newest first."""
        ...

    def sweep_audit(self, older_than_s: float, limit: int) -> int:
        """Remove notes that are older than given."""
        ...


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
