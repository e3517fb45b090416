"""Create and revoke API tokens."""

import os
from collections.abc import Iterable

from unstuck.client.operator.audit import AuditLog
from unstuck.domain.api_tokens import MAX_NAME_CHARS, hash_of, mint, proof_of, read_scopes
from unstuck.domain.text import did_you_mean
from unstuck.errors import ConfigError, UnknownName
from unstuck.ledger.contract import Ledger
from unstuck.ledger.contract.admin import ApiTokenRecord, NewApiToken

SEAL_BYTES = 32


class Access:
    """Decide who may use the HTTP API."""

    def __init__(self, ledger: Ledger, audit: AuditLog) -> None:
        self._ledger = ledger
        self._audit = audit

    def create_token(
        self, name: str, scopes: Iterable[str], expires_in_s: float | None = None
    ) -> tuple[str, NewApiToken]:
        """Create a token for the HTTP API. Return its text, which cannot be read again later, and what was stored."""
        text, kept = _make(name, scopes, self._audit.by, expires_in_s)
        with self._audit.record("create_token", f"token {kept.id} ({name}): {', '.join(kept.scopes)}"):
            self._ledger.admin.add_api_token(kept)
        return text, kept

    def revoke_token(self, text: str) -> tuple[ApiTokenRecord, bool]:
        """Revoke a token, named by its id or name. Return it, and whether it was not revoked before."""
        token = _find(self._ledger, text)
        with self._audit.record("revoke_token", f"token {token.id} ({token.name})") as entry:
            changed = self._ledger.admin.revoke_api_token(token.id)
            entry.outcome = "done" if changed else "it was revoked already"
        return token, changed


def _make(name: str, scopes: Iterable[str], by: str, expires_in_s: float | None) -> tuple[str, NewApiToken]:
    """Return the text of a new token, which is stored nowhere, and the record to store."""
    if not name.strip() or len(name) > MAX_NAME_CHARS or not name.isprintable():
        raise ConfigError(f"A token needs a name of 1 to {MAX_NAME_CHARS} printable characters, not {name[:50]!r}.")
    if expires_in_s is not None and expires_in_s <= 0:
        raise ConfigError("A token that expires at once lets nobody in.")
    allowed = tuple(sorted(read_scopes(scopes)))
    token_id, text = mint()
    kept = NewApiToken(token_id, name, hash_of(proof_of(text)), os.urandom(SEAL_BYTES), allowed, by, expires_in_s)
    return text, kept


def _find(ledger: Ledger, text: str) -> ApiTokenRecord:
    """Return the token with this id, or with this name if only one valid token has it."""
    tokens = ledger.admin.api_tokens()
    for found in ([t for t in tokens if t.id == text], [t for t in tokens if t.name == text and t.valid]):
        if len(found) == 1:
            return found[0]
        if found:
            ids = ", ".join(token.id for token in found[:5])
            raise UnknownName(f"{text[:80]!r} could be any of {len(found)} tokens: {ids}. Give the id.")
    known = [word for token in tokens for word in (token.id, token.name)]
    raise UnknownName(f"There is no token {text[:80]!r}.{did_you_mean(text, known)} `unstuck tokens list` lists them.")
