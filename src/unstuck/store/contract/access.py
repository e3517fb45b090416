"""Who may come in through the web door, and what operators did."""

from typing import Protocol

from unstuck.store.records import ApiTokenRecord, AuditRecord, NewApiToken


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

    def begin_audit(self, by: str, door: str, verb: str, target: str) -> int:
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
