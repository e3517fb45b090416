"""Create, list and revoke API tokens."""

import os
from collections.abc import Iterable

from unstuck.client.operator.audit import Verbs
from unstuck.domain.api_tokens import MAX_NAME_CHARS, hash_of, mint, proof_of, read_scopes
from unstuck.domain.text import did_you_mean
from unstuck.errors import ConfigError, UnknownName
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.admin import ApiTokenRecord, AuditRecord, NewApiToken

SEAL_BYTES = 32


def make(name: str, scopes: Iterable[str], by: str, expires_in_s: float | None) -> tuple[str, NewApiToken]:
    """Make a token; give its text, which is kept nowhere, and what is to be written down of it."""
    if not name.strip() or len(name) > MAX_NAME_CHARS or not name.isprintable():
        raise ConfigError(f"A token needs a name of 1 to {MAX_NAME_CHARS} printable characters, not {name[:50]!r}.")
    if expires_in_s is not None and expires_in_s <= 0:
        raise ConfigError("A token that expires at once lets nobody in.")
    allowed = tuple(sorted(read_scopes(scopes)))
    token_id, text = mint()
    kept = NewApiToken(token_id, name, hash_of(proof_of(text)), os.urandom(SEAL_BYTES), allowed, by, expires_in_s)
    return text, kept


def find(ledger: Ledger, text: str) -> ApiTokenRecord:
    """Find a token by its id, or by a name that only one valid token has."""
    tokens = ledger.api_tokens()
    for found in ([t for t in tokens if t.id == text], [t for t in tokens if t.name == text and t.valid]):
        if len(found) == 1:
            return found[0]
        if found:
            ids = ", ".join(token.id for token in found[:5])
            raise UnknownName(f"{text[:80]!r} could be any of {len(found)} tokens: {ids}. Give the id.")
    known = [word for token in tokens for word in (token.id, token.name)]
    raise UnknownName(f"There is no token {text[:80]!r}.{did_you_mean(text, known)} `unstuck tokens list` lists them.")


class AdmittingVerbs(Verbs):
    """A part of the operator's verbs."""

    def create_token(
        self, name: str, scopes: Iterable[str], expires_in_s: float | None = None
    ) -> tuple[str, NewApiToken]:
        """Make a token of the HTTP server; its text is given here and nowhere else ever again."""
        text, kept = make(name, scopes, self._by, expires_in_s)
        with self._audit.record(self._by, "create_token", f"token {kept.id} ({name}): {', '.join(kept.scopes)}"):
            self._ledger.add_api_token(kept)
        return text, kept

    def revoke_token(self, text: str) -> tuple[ApiTokenRecord, bool]:
        """End a token by its id or name; gives it, and whether it still stood."""
        token = find(self._ledger, text)
        with self._audit.record(self._by, "revoke_token", f"token {token.id} ({token.name})") as note:
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
        with self._audit.record(self._by, "void_tokens", "every living worker") as note:
            workers = self._ledger.void_tokens()
            note.outcome = f"{workers} workers"
        return workers
