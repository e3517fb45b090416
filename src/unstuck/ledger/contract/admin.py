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


class Admin(Protocol):
    """API tokens, the audit log and counters."""

    def add_api_token(self, token: NewApiToken) -> None:
        """Store a token of the HTTP API; its id must be new."""
        ...

    def api_tokens(self) -> list[ApiTokenRecord]:
        """Return every token there ever was, oldest first, even revoked and expired ones."""
        ...

    def revoke_api_token(self, token_id: str) -> bool:
        """Revoke a token for good. Return False if there is none or it is revoked already."""
        ...

    def begin_audit(self, by: str, via: str, verb: str, target: str) -> int:
        """Write down what an operator is about to do, before it is done. Return the id of the entry."""
        ...

    def end_audit(self, audit_id: int, outcome: str) -> None:
        """Add how it ended."""
        ...

    def audit(self, before_id: int | None = None, limit: int = 100) -> list[AuditRecord]:
        """Newest first."""
        ...

    def count(self, totals: Sequence[Count], lately: Sequence[Count] = ()) -> None:
        """Add to what was counted since ever, and to what was counted in this minute, in one commit.

        No name and labels may be twice among `totals`, nor among `lately`. After an UncertainCommit it may have
        happened: who cannot bear to count twice must not repeat it."""
        ...

    def counters(self) -> list[Count]:
        """Return the totals of all counters."""
        ...

    def counter_series(self, names: Collection[str], since_minute: int) -> list[MinuteCount]:
        """Return what was counted minute by minute, oldest first. Minutes without a count are left out."""
        ...

    def counter_sums(self, name: str, since_minute: int) -> list[Count]:
        """Return what was counted under a name since a minute, added up by labels."""
        ...
