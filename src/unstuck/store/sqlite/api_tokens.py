"""Keep the tokens of the web door."""

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from unstuck.store.records import ApiTokenRecord, NewApiToken
from unstuck.store.sqlite.errors import refuse_nul
from unstuck.store.sqlite.verbs import SQL, Verbs, fetch


class ApiTokenVerbs(Verbs):
    def add_api_token(self, token: NewApiToken) -> None:
        refuse_nul(token.id, token.name, token.created_by)
        now = time.time()
        expires_at = None if token.expires_in_s is None else now + token.expires_in_s
        scopes = msgspec.json.encode(token.scopes).decode()
        values = (token.id, token.name, token.hash, token.seal, scopes, now, token.created_by, expires_at)
        with self.db.write() as cursor:
            cursor.execute(SQL["add_api_token"], values)

    def api_tokens(self) -> list[ApiTokenRecord]:
        now = time.time()
        with self.db.read() as cursor:
            rows = fetch(cursor, "api_tokens")
        return [_record(row, now) for row in rows]

    def revoke_api_token(self, token_id: str) -> bool:
        refuse_nul(token_id)
        with self.db.write() as cursor:
            cursor.execute(SQL["revoke_api_token"], (token_id, time.time()))
            return bool(cursor.connection.changes())


def _record(row: Sequence[Any], now: float) -> ApiTokenRecord:
    expires_at, revoked_at = row[-2:]
    valid = revoked_at is None and (expires_at is None or expires_at > now)
    return ApiTokenRecord(*(*row[:4], tuple(msgspec.json.decode(row[4])), *row[5:], valid))
