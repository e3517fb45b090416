"""Say who may come in, and show what was done: tokens of the web door, the audit log."""

from collections.abc import Iterable

from unstuck.client import tokens
from unstuck.client.operator.base import Verbs
from unstuck.store.records import ApiTokenRecord, AuditRecord, NewApiToken


class AdmittingVerbs(Verbs):
    """A part of the operator's verbs."""

    def create_token(
        self, name: str, scopes: Iterable[str], expires_in_s: float | None = None
    ) -> tuple[str, NewApiToken]:
        """Make a token of the web door; its text is given here and nowhere else ever again."""
        text, kept = tokens.make(name, scopes, self._by, expires_in_s)
        with self._audit.note(self._by, "create_token", f"token {kept.id} ({name}): {', '.join(kept.scopes)}"):
            self._ledger.add_api_token(kept)
        return text, kept

    def revoke_token(self, text: str) -> tuple[ApiTokenRecord, bool]:
        """End a token by its id or name; gives it, and whether it still stood."""
        token = tokens.find(self._ledger, text)
        with self._audit.note(self._by, "revoke_token", f"token {token.id} ({token.name})") as note:
            changed = self._ledger.revoke_api_token(token.id)
            note.outcome = "done" if changed else "it was revoked already"
        return token, changed

    def tokens(self) -> list[ApiTokenRecord]:
        return self._ledger.api_tokens()

    def audit(self, before_id: int | None = None, limit: int = 100) -> list[AuditRecord]:
        """List what operators did, newest first."""
        return self._ledger.audit(before_id, limit)

    def void_attempt_tokens(self) -> int:
        """After a restore from a backup: see the ledger's `void_tokens`. Gives the number of workers."""
        with self._audit.note(self._by, "void_tokens", "every living worker") as note:
            workers = self._ledger.void_tokens()
            note.outcome = f"{workers} workers"
        return workers
