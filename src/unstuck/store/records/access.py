"""Who may come in through the web door, and what operators did."""

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
    door: str
    verb: str
    target: str
    outcome: str | None
    """None: it was begun, and nobody knows how it ended."""
